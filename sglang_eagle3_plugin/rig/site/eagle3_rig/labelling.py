"""Make any loaded target a labelled one, and its draft the one that knows it: weights are written after the model is built.

For families whose checkpoints nobody lays out by hand here. The engine loads dummy weights; then, by structure, the decoder's
are replaced: every layer writes its noise into channels from ``noise_from`` on, and its label into a channel of its own through a
hook on its output; the embedding writes a constant and two digits, the head reads the digits. What a token is followed by then
depends on that token alone; see ``rig/families.py``. Nothing here looks at what the plugin adds.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "sglang.srt.model_executor.model_runner"
PROCESSOR_MODULE = "sglang.srt.multimodal.processors.base_processor"


def install(module: ModuleType) -> None:
    """Wrap ``ModelRunner.load_model`` so that what it has loaded is rewritten; ``EAGLE3_RIG_LABEL`` says how (JSON): a plan of
    rig/families.py, or ``noise`` alone, the size of random weights for target and draft."""
    load_model = module.ModelRunner.load_model

    @functools.wraps(load_model)
    def labelled(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        plan = json.loads(os.environ["EAGLE3_RIG_LABEL"])
        result = load_model(self, *args, **kwargs)
        with torch.no_grad():
            if "noise" in plan:
                _fill(self.model, plan["noise"])
            elif not getattr(self, "is_draft_worker", False):
                label_target(self.model, plan)
            elif plan["draft"]:
                from safetensors.torch import load_file

                self.model.load_weights(iter(load_file(plan["draft"]).items()))
        return result

    module.ModelRunner.load_model = labelled
    # Vision towers ask for the accelerator by name, and there is none. Model files import this function when they are imported.
    for name in ("sglang.srt.utils.common", "sglang.srt.utils"):
        if hasattr(sys.modules.get(name), "get_device"):
            sys.modules[name].get_device = lambda *args, **kwargs: "cpu"  # type: ignore[attr-defined]
    _stay_on_the_cpu()
    _rewire_when_asked(module.ModelRunner)


def prepare_images_here(module: ModuleType) -> None:
    """Let image processors run where there is no accelerator; SGLang sends their pixels to ``cuda`` unless this flag is set."""
    module._is_cpu = True  # type: ignore[attr-defined]


def _stay_on_the_cpu() -> None:
    """``module.to(device="cuda")``, as MiniCPM-V's resampler is moved up to some release, leaves it where it is."""
    import torch

    to = torch.nn.Module.to

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    if not torch.cuda.is_available():
        torch.nn.Module.to = moved


def _rewire_when_asked(runner: Any) -> None:
    """Call the target's setter with other ids when the file that ``EAGLE3_RIG_REWIRE`` names appears."""
    path = Path(os.environ.get("EAGLE3_RIG_REWIRE", os.devnull + "/none"))
    forward = runner.forward

    @functools.wraps(forward)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "is_draft_worker", False) and path.exists():
            setter = self.model.set_eagle3_layers_to_capture
            getattr(setter, "stock", setter)(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
        return forward(self, *args, **kwargs)

    runner.forward = asked


def _fill(model: Any, size: float) -> None:
    """Random weights of this size everywhere, the same in every process; norms multiply by 1."""
    import torch

    for name, parameter in model.named_parameters():
        if torch.is_floating_point(parameter) and parameter.dim() > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * size)
        elif torch.is_floating_point(parameter):
            parameter.data.fill_(float(name.endswith("weight")))


def label_target(model: Any, plan: dict[str, Any]) -> None:
    """Rewrite a loaded target. ``plan``: hidden_size, layers, noise_from, labels, value, const, a, b, digits, const_size,
    digit_size, head_size, embed_scale, multiply, add."""
    import torch

    stack, layers = _decoder(model, plan["layers"])
    for name, parameter in layers.named_parameters():
        _noise(name, parameter, _norm_is_offset(layers, name), plan)
    embedding = head = None
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or name.startswith("layers."):
            continue
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if "ParallelLMHead" in kinds or name.rpartition(".")[2] in ("lm_head", "embed_out"):
            head = head if head is not None else weight
        elif (
            kinds & {"VocabParallelEmbedding", "Embedding"} and weight.shape[-1] == plan["hidden_size"] and _is_below(module, stack)
        ):
            if embedding is None and len(weight) >= plan["vocab_size"] and "pos" not in name and not name.endswith("wpe"):
                embedding = weight
            else:
                weight.zero_()  # learned positions
        elif weight.dim() == 1 and _is_child(module, stack):
            weight.fill_(0.0 if _is_offset(module) else 1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
    if embedding is None:
        raise RuntimeError(f"the rig found no token embedding in {type(model).__name__}")
    _write_embedding(embedding, plan)
    if head is not None and head.data_ptr() != embedding.data_ptr():
        _write_head(head, plan)
    for module in model.modules():
        # MLA's absorbed weights are made of the loaded ones, which dummy loading leaves out.
        if callable(getattr(type(module), "post_load_weights", None)):
            module.post_load_weights()
    for i, layer in enumerate(layers):
        layer.register_forward_hook(functools.partial(_mark, channel=plan["labels"] + i, value=plan["value"]))


def _decoder(model: Any, count: int) -> tuple[Any, Any]:
    """The stack and its list of ``count`` decoder layers: the ones whose forward takes a forward_batch."""
    for module in model.modules():
        for child in module.children():
            if (
                type(child).__name__ == "ModuleList"
                and len(child) == count
                and any("forward_batch" in _parameters(layer) for layer in child)
            ):
                return module, child
    raise RuntimeError(f"the rig found no list of {count} decoder layers in {type(model).__name__}")


def _parameters(layer: Any) -> set[str]:
    import inspect

    return set(inspect.signature(type(layer).forward).parameters)


def _is_below(module: Any, stack: Any) -> bool:
    return any(module is m for m in stack.modules())


def _is_child(module: Any, stack: Any) -> bool:
    return any(module is m for m in stack.children())


def _is_offset(module: Any) -> bool:
    """Whether a norm multiplies by 1 + weight."""
    return type(module).__name__.startswith("Gemma")


def _norm_is_offset(layers: Any, parameter: str) -> bool:
    return _is_offset(layers.get_submodule(parameter.rpartition(".")[0]))


def _noise(name: str, parameter: Any, offset: bool, plan: dict[str, Any]) -> None:
    import torch

    if not torch.is_floating_point(parameter):
        return
    data = parameter.data
    if data.dim() < 2:
        is_norm = name.endswith("weight") and any(word in name for word in ("norm", "ln"))
        data.fill_(1.0 if is_norm and not offset else 0.0)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    data.copy_(torch.randn(data.shape, generator=generator) * 0.02)
    written = data.dim() - 2  # [out, in], or [experts, out, in]
    if data.shape[written] == plan["hidden_size"]:
        data.narrow(written, 0, plan["noise_from"]).zero_()


def _write_embedding(weight: Any, plan: dict[str, Any]) -> None:
    import torch

    digits, tokens = plan["digits"], torch.arange(len(weight))
    weight.zero_()
    weight[:, plan["const"]] = plan["const_size"]
    said = tokens < digits * digits
    weight[tokens[said], plan["a"] + tokens[said] // digits] = plan["digit_size"]
    weight[tokens[said], plan["b"] + tokens[said] % digits] = plan["digit_size"]
    weight.div_(plan["embed_scale"])


def _write_head(weight: Any, plan: dict[str, Any]) -> None:
    digits = plan["digits"]
    weight.zero_()
    for a in range(digits):
        for b in range(digits):
            following = digits * ((plan["multiply"] * a + plan["add"]) % digits) + (plan["multiply"] * b + plan["add"]) % digits
            weight[following, plan["a"] + a] = weight[following, plan["b"] + b] = plan["head_size"]


def _mark(layer: Any, args: Any, output: Any, *, channel: int, value: float) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    hidden[..., channel] += value
