"""The hooks of the target's class: `set_eagle3_layers_to_capture` and `get_embed_and_head`, and whether setting captures at all."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

_SETTER, _ACCESSOR = "set_eagle3_layers_to_capture", "get_embed_and_head"


def check(d: Deployment) -> Iterator[Finding]:
    """Find a target class that lacks a hook which EAGLE-3 calls, or whose setter captures nothing."""
    name = d.target.architecture if d.target else None
    if name is None or not d.eagle3:
        return
    hooks = facts.hooks(d.release, name, d.source)
    if hooks is None:
        return
    where = Evidence("SGLang", f"{name} in {d.release or d.source}", hooks.describe())
    missing = [hook for hook, there in ((_SETTER, hooks.setter), (_ACCESSOR, hooks.accessor)) if not there]
    later = facts.native_from(d.release, name)
    tags = (*(("FIXABLE_BY_PLUGIN",) if hooks.mendable else ()), "EARLY_FAIL", *((f"OK_FROM_{later}",) if later else ()))
    upgrade = f", or use SGLang {later} or newer, where {name} has it" if later else ""
    if not missing and not hooks.dead:
        return
    if d.plugin and hooks.mendable:
        yield Finding(
            "INFO_FIXED_BY_PLUGIN",
            f"{name} lacks what EAGLE-3 needs here ({', '.join(missing) or 'a setter that marks its layers'}); "
            "sglang-eagle3-plugin is active and supplies it.",
            (where,),
        )
    elif len(missing) == 2:
        how = facts.missing_setter(d.release)
        yield Finding(
            "ERR_WRAPPER_NO_HOOKS",
            f"{name} has neither {_SETTER} nor {_ACCESSOR}: the scheduler dies with an {how} after the weights are loaded.",
            (where,),
            f"Install sglang-eagle3-plugin beside this SGLang; it hands both on to the language model{upgrade}."
            if hooks.mendable
            else f"Its layers keep no residual stream that could be captured{upgrade}.",
            tags,
        )
    elif missing:
        yield Finding(
            "ERR_WRAPPER_PARTIAL_HOOKS",
            f"{name} has {_ACCESSOR if missing == [_SETTER] else _SETTER} but not {missing[0]}, and EAGLE-3 calls both.",
            (where,),
            f"Install sglang-eagle3-plugin beside this SGLang; it supplies {missing[0]} alone and leaves the other{upgrade}.",
            ("FIXABLE_BY_PLUGIN", *(tag for tag in tags if tag != "FIXABLE_BY_PLUGIN")),
        )
    else:
        yield Finding(
            "ERR_CAPTURE_DEAD",
            f"{name} inherits {_SETTER}, but its decoder layers go by marks that this setter never writes: no layer is captured.",
            (where,),
            f"Install sglang-eagle3-plugin beside this SGLang; it marks the layers{upgrade}.",
            ("FIXABLE_BY_PLUGIN", *(tag for tag in tags if tag != "FIXABLE_BY_PLUGIN")),
        )


def check_target(d: Deployment) -> Iterator[Finding]:
    """Find a draft given as the target."""
    if d.target and "eagle3" in (d.target.architecture or "").lower():
        yield Finding(
            "ERR_TARGET_IS_DRAFT",
            f"The target's architecture is {d.target.architecture}, which is a draft.",
            (d.target.says("architectures"),),
            "Swap --target and --draft.",
        )
