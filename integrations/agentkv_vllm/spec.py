"""AgentKVSpec: vLLM's tiering spec with our tiers, order and defaults, and a worker of our own where there is no GPU.

One line of configuration brings it all (docs/vllm.md). On a GPU vLLM's own worker copies; its stock spec refuses a CPU build,
where pool and tier are both main memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agentkv.errors import ConfigError
from agentkv_vllm.config import completed
from agentkv_vllm.copier import Copier, Group, Plane
from agentkv_vllm.versions import require

require()

from vllm.platforms import current_platform  # noqa: E402  only for a version that was read
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult  # noqa: E402
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402


class AgentKVSpec(TieringOffloadingSpec):
    """Extra configuration: `cpu_bytes_to_use`, and in `agentkv`: `disk`, `disk_bytes`, `socket`, `margin_s`, `wake`."""

    def __init__(self, config: Any) -> None:
        super().__init__(replace(config, extra_config=completed(config.extra_config)))
        self._worker: Any = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        definitions: dict[str, Any] = super().build_metric_definitions(completed(extra_config))
        return definitions

    def get_manager(self) -> Any:
        """As vLLM makes it. On a CPU build the tier's memory loses its name once both sides have it: a killed engine would
        leave it in /dev/shm for ever.
        """
        manager = super().get_manager()
        region = self._scheduler_mmap
        alone = self.config.parallel.world_size == 1 and current_platform.is_cpu()
        if alone and region is not None and getattr(region, "_creator", True) is False:  # its only worker was first
            Path(region.mmap_path).unlink(missing_ok=True)
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            if self.config.canonical_layout:
                raise ConfigError("canonical_layout is for GPUs; on a CPU build the copies are plain pages")
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = MemcpyWorker(kv_caches, region, self.blocks_per_chunk)
            except Exception:
                region.cleanup()
                raise
        return self._worker


class MemcpyWorker(OffloadingWorker):
    """Copies between a pool and a tier that are both main memory. Takes over `region`."""

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._per = blocks_per_chunk
        self._region = region
        self._tensors = [one.tensor for one in kv_caches.tensors]  # their memory must stay
        views = [region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk) for one in kv_caches.tensors]
        self._planes = [
            [
                Plane(
                    pool=self._tensors[ref.tensor_idx].data_ptr(),
                    pool_stride=self._tensors[ref.tensor_idx].stride(0) * self._tensors[ref.tensor_idx].element_size(),
                    tier=views[ref.tensor_idx].data_ptr(),
                    tier_stride=views[ref.tensor_idx].stride(0),
                    tier_page=kv_caches.tensors[ref.tensor_idx].page_size_bytes,
                    page_bytes=ref.page_size_bytes,
                )
                for ref in refs
            ]
            for refs in kv_caches.group_data_refs
        ]
        self._copier = Copier(blocks_per_chunk)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copier.submit(job_id, self._groups(src_spec, dst_spec), load=False)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        self._copier.submit(job_id, self._groups(dst_spec, src_spec), load=True)
        return True

    def get_finished(self) -> list[Any]:
        return [
            TransferResult(job_id=one.job, success=True, transfer_size=one.size_bytes, transfer_time=one.seconds)
            for one in self._copier.done()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        self._copier.close()
        self._region.cleanup()

    def _groups(self, pool: Any, tier: Any) -> list[Group]:
        """The flat lists by cache group; the last and the first chunk of a group may be there in part."""
        blocks, chunks = [int(number) for number in pool.block_ids], [int(number) for number in tier.block_ids]
        groups = []
        for planes, size, first in zip(self._planes, pool.group_sizes, pool.block_indices, strict=True):
            skip = first % self._per if size else 0
            count = -(-(skip + size) // self._per)
            groups.append(Group(planes=planes, blocks=blocks[:size], chunks=chunks[:count], skip=skip))
            blocks, chunks = blocks[size:], chunks[count:]
        if blocks or chunks:
            raise ValueError(f"{len(blocks)} blocks and {len(chunks)} chunks are left: the lists do not fit")
        return groups
