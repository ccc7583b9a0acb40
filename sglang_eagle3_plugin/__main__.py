"""`python -m sglang_eagle3_plugin` is the command `sglang-eagle3`."""

from sglang_eagle3_plugin.cli import main

main()
