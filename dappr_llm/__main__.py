"""`python -m dappr_llm`, and `accelerate launch -m dappr_llm`."""

from .commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
