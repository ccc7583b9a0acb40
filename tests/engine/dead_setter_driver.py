"""Run by an SGLang environment's Python: case W05 on the release's own Qwen3.5 stack. Prints what is captured, as JSON.

Qwen3.5's wrappers inherit a setter that assigns a list, and their stack captures at layers that carry a mark.
"""

import json

import sglang.srt.models.qwen3_5 as qwen3_5
from torch import nn

from sglang_eagle3_plugin.runtime.capture import LayerStack

stack = object.__new__(qwen3_5.Qwen3_5ForCausalLM)
nn.Module.__init__(stack)
stack.layers = nn.ModuleList(nn.Identity() for _ in range(8))
stack.norm = nn.Identity()
stack.layers_to_capture = [3, 5]  # what the inherited setter does
found = LayerStack(stack, 8)
inherited = list(found.captured)
found.capture((2, 4, 5))
print("RESULT " + json.dumps({"inherited": inherited, "ours": list(found.captured)}))
