"""The routers of Hugging Face models: where they are, and how each goes from logits to a choice.

One entry per family in `FAMILIES`, found by the class of the router module. A router is called with
hidden states and returns (logits [tokens, experts], weights [tokens, top_k], ids [tokens, top_k]).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from moejax.capture._versions import require_torch, require_transformers
from moejax.models import Router


class Rule(NamedTuple):
    """How one router chooses. Fields: `router`, in moejax's terms; `top_k`; `num_experts`; `bias`,
    torch [experts], added to the scores for the choice only, or None; `cast`, whether weights are
    rounded to the logits' precision; `epsilon`, what is added before weights are divided."""

    router: Router
    top_k: int
    num_experts: int
    bias: Any = None
    cast: bool = False
    epsilon: float = 0.0


def _softmax(renormalize: bool | None, cast: bool) -> Callable[[Any], Rule]:
    """Softmax over all experts, then the largest; `None` reads `norm_topk_prob`."""

    def rule(module: Any) -> Rule:
        scaled = module.norm_topk_prob if renormalize is None else renormalize
        router = Router("softmax", "before_topk", bool(scaled))
        return Rule(router, module.top_k, module.num_experts, cast=cast)

    return rule


def _deepseek_v2(module: Any) -> Rule:
    limited = module.topk_method == "group_limited_greedy"
    groups = (module.num_group, module.topk_group) if limited else (1, 1)
    router = Router("softmax", "before_topk", False, *groups, float(module.routed_scaling_factor))
    return Rule(router, module.top_k, module.num_experts)


def _deepseek_v3(module: Any) -> Rule:
    scaling = float(module.routed_scaling_factor)
    groups = module.num_group, module.topk_group
    router = Router("sigmoid", "none", bool(module.norm_topk_prob), *groups, scaling)
    bias = module.e_score_correction_bias
    return Rule(router, module.top_k, module.num_experts, bias, epsilon=1e-20)


def _gpt_oss(module: Any) -> Rule:
    router = Router("softmax", "after_topk", True)
    return Rule(router, module.top_k, module.num_experts, cast=True)


FAMILIES: dict[str, Callable[[Any], Rule]] = {
    "MixtralTopKRouter": _softmax(renormalize=True, cast=False),
    "Qwen2MoeTopKRouter": _softmax(renormalize=None, cast=True),
    "Qwen3MoeTopKRouter": _softmax(renormalize=None, cast=True),
    "Qwen3NextTopKRouter": _softmax(renormalize=None, cast=True),
    "OlmoeTopKRouter": _softmax(renormalize=None, cast=True),
    "DeepseekV2TopkRouter": _deepseek_v2,
    "DeepseekV3TopkRouter": _deepseek_v3,
    "GptOssTopKRouter": _gpt_oss,
}


class Layer(NamedTuple):
    """One MoE layer of a model. Fields: `name`, of the router module; `number`, of the layer among
    all layers; `router`, the module; `experts`, its neighbor that runs them, or None; `rule`."""

    name: str
    number: int
    router: Any
    experts: Any
    rule: Rule


def find_layers(model: Any) -> list[Layer]:
    """The MoE layers of a model, in order.

    **Raises:** `ValueError` for what is no model, where there is none of a known class, naming what
    there is instead, and where layers differ in experts or `top_k`.
    """
    require_transformers()
    if not isinstance(model, require_torch().nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}: allowed is a loaded model, as from_pretrained "
            "returns it (of a pipeline: its .model)"
        )
    modules = dict(model.named_modules())
    layers = [
        Layer(name, _number(name), module, _experts_beside(modules, name), rule(module))
        for name, module in modules.items()
        if (rule := FAMILIES.get(type(module).__name__)) is not None
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no router that is known: {_instead(modules)}")
    sizes = {(layer.rule.num_experts, layer.rule.top_k) for layer in layers}
    if len(sizes) > 1:
        raise ValueError(
            f"{type(model).__name__}: layers differ in (experts, top_k): {sorted(sizes)}; allowed "
            "is one pair"
        )
    return layers


def _number(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return numbers[0] if numbers else 0


def _experts_beside(modules: dict[str, Any], name: str) -> Any:
    return modules.get(f"{name.rpartition('.')[0]}.experts")


def _instead(modules: dict[str, Any]) -> str:
    alike = {type(module).__name__ for module in modules.values()}
    alike = sorted(name for name in alike if "outer" in name or "Gate" in name or "Moe" in name)
    found = f"found {', '.join(alike)}; " if alike else ""
    return f"{found}known are {', '.join(FAMILIES)}"


def check_output(output: Any, layer: Layer) -> tuple[Any, Any, Any]:
    """(logits, weights, ids) of a router, or a `ValueError` that names it."""
    shapes = [getattr(part, "shape", None) for part in output] if type(output) is tuple else []
    if len(shapes) == 3 and all(shape is not None and len(shape) == 2 for shape in shapes):
        logits, weights, ids = output
        rule = layer.rule
        fits = logits.shape[1] == rule.num_experts and ids.shape == weights.shape
        if fits and ids.shape[1] == rule.top_k:
            return logits, weights, ids
    raise ValueError(
        f"{layer.name} returned {shapes or type(output).__name__}: allowed is (logits [tokens, "
        f"{layer.rule.num_experts}], weights and ids [tokens, {layer.rule.top_k}]); a fused kernel "
        "or another version of transformers?"
    )


def scores(rule: Rule, logits: Any) -> Any:
    """What the model compares and weighs by, before any bias: float32 [tokens, experts].

    For gpt-oss, which takes the softmax of the chosen logits, the softmax of all of them: the same
    order and, renormalized, the same weights.
    """
    wide = logits.float()
    return wide.softmax(-1) if rule.router.score == "softmax" else wide.sigmoid()


def selection(rule: Rule, score: Any) -> Any:
    """`score` as it is compared: with the bias, and -inf outside the groups that are on offer."""
    torch = require_torch()
    compared = score if rule.bias is None else score + rule.bias
    router = rule.router
    if router.num_groups == 1:
        return compared
    grouped = compared.view(len(score), router.num_groups, -1)
    if router.score == "softmax":
        value = grouped.max(dim=-1).values
    else:
        value = grouped.topk(2, dim=-1)[0].sum(dim=-1)
    # The very calls of the models, so that ties between groups fall alike.
    best = torch.topk(value, k=router.top_groups, dim=-1, sorted=False)[1]
    offered = torch.zeros_like(value).scatter_(1, best, 1).bool()
    return grouped.masked_fill(~offered[:, :, None], float("-inf")).view_as(score)


def weights(rule: Rule, logits: Any, score: Any, ids: Any) -> Any:
    """Combine weights of the experts `ids` [tokens, top_k], by the model's own rule."""
    router = rule.router
    if router.softmax_position == "after_topk":
        return logits.gather(1, ids).softmax(dim=-1)
    chosen = score.gather(1, ids)
    if router.renormalize:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + rule.epsilon)
    chosen = chosen * router.scaling if router.scaling != 1 else chosen
    return chosen.to(logits.dtype) if rule.cast else chosen
