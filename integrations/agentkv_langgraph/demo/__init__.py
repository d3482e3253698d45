"""The `agentkv demo` command: several real LangGraph tasks on one engine whose device memory is too small for them."""
