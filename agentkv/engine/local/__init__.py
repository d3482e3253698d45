"""The embedded engine: Hugging Face models over agentkv's own blocks, scheduler and tiers."""
