"""Random programs on 1 to 3 ranks equal one process that computes the formula in float64.

The reference shares no code with the package. A failure shows its program; ``-m slow -k '[17]'`` runs one again.
BAGUA_SYNCBN_PROGRAMS is how many there are.
"""

import copy
import gc
import itertools
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn.communicators import LOCAL
from tests.helpers.formula import mixture, moments, move, normalize, per_channel, values_of

RANKS = (1, 2, 3, 2)  # by seed, modulo 4
SEEDS = sorted(range(int(os.environ.get("BAGUA_SYNCBN_PROGRAMS", "400"))), key=lambda seed: RANKS[seed % 4])
ACTIVATIONS = {"": nn.Identity, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh, "leaky": nn.LeakyReLU}
ACTIVATIONS |= {f"{name} in place": partial(ACTIVATIONS[name], inplace=True) for name in ("relu", "silu")}
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}  # relative to the largest value, or to 1

# Options that are easily confused. Equal numbers are the same option: 0, 0.0, -0.0 and False; 1 and True.
NEAR = {
    "momentum": (None, 0, 0.0, -0.0, False, 1, True, -1, -2, 0.1, 0.1 + 2**-56),
    "eps": (0.1, 0.1 + 2**-56, 0.1 + 2**-30, 1, 1.0),
}
MODEL = {
    "dtype": ("float64", "float64", "float32", "bfloat16"),
    "dims": (3, 2, 3, 4, 5),
    "layers": (2, 1),
    "crop": (False, True),  # between two layers
    "eps": (0.01, *NEAR["eps"]),
    "eps_mode": ("plus", "plus", "clamp"),
    "momentum": (0.5, None, *NEAR["momentum"]),
    "affine": (True, True, True, False),
    "tracks": (True, True, True, False),
    "skips": (False, True),
    "activation": ("relu", "relu in place", "leaky", "silu", "silu in place", "tanh", ""),
    "computed by": ("module", "layer", "fused", "fused"),
    "recompute": (False, False, True),
    "compile": (*[False] * 29, True),
    "group": ("all", "all", "own", "alone"),
    "subclass": ((), (), (), (0, 1, 2), (0,)),  # ranks with inputs of a subclass
    "threads": (*[False] * 5, True),  # two, in each of which the program runs in a group of its own
    "odd": ("", "", "", "", "momentum", "eps"),  # drawn by the last rank for itself, which all must be told
}
EVENTS = ("", "freeze one", "freeze all", "unfreeze", "deepcopy", "pickle", "hook", "merge", "refuse", "look", "move")
STEP = {
    "event": EVENTS,
    "mode": ("train", "train", "train", "train", "eval"),
    "batches": (1, 1, 2),
    "accumulate": (False, False, True),
    "checkpoint": ("", "", "reentrant", "not reentrant"),
    "backward": ("within", "after", "after", "last", "none"),  # within masked(); after all batches; not at all
    "order": (1, 1, 1, 2),
    "residual": (False, False, False, True),
    "input grad": (True, True, True, False),
    "layout": ("contiguous", "transposed", "sliced", "channels_last"),
    "spoiled": (False, False, False, True),
}
MASKS = ("", "", "", "mask", "lengths", "masked", "masked", "masked by rule", "masked lengths")


def program(seed):
    """Returns the traits of a model and of each step, without unsupported or badly conditioned combinations."""
    draw = random.Random(seed)
    model = {name: draw.choice(values) for name, values in MODEL.items()}
    if model["dtype"] == "bfloat16":
        model |= {"layers": 1, "eps": 1.0}
    if model["dtype"] == "bfloat16" or not model["affine"]:  # 0, to which equal values are normalized, is no kink
        model["activation"] = model["activation"].replace("relu", "silu").replace("leaky", "tanh")
    if model["compile"]:
        model |= {"subclass": (), "threads": False, "odd": ""}
    odd = [model["odd"]] * (model["odd"] != "" and RANKS[seed % 4] > 1)
    model["group"] = "own" if odd or model["threads"] else model["group"]
    model |= {name: draw.choice(NEAR[name]) for name in odd}
    model["odd"] = {name: draw.choice(NEAR[name]) for name in odd}
    model["differs"] = any(model[name] != value for name, value in model["odd"].items())
    model["tracks"] |= bool(odd)
    is_negative = model["momentum"] in (-1, -2)  # some variances are negative too, which nothing can be divided by
    left_out = ["move", "pickle"] if model["threads"] else ["move"] * (model["group"] == "alone")  # pickles share one
    left_out += ["freeze one", "freeze all"] * (is_negative or not model["tracks"]) + ["merge"] * is_negative
    model["crop"] = model["crop"] and model["layers"] == 2 and model["dims"] > 2
    steps = [
        {name: draw.choice(values) for name, values in STEP.items()}
        for _ in range(3 if model["compile"] else draw.randint(3, 5))
    ]
    if model["differs"]:
        steps = [steps[0] | {"mode": "train", "event": ""}]
    for step in steps:
        ranks = range(RANKS[seed % 4])
        step["masks"], step["zero"] = (
            [draw.choice(values)] * len(ranks) if draw.random() < 0.5 else [draw.choice(values) for _ in ranks]
            for values in (MASKS, (False, True))
        )
        if model["dims"] == 2:
            step["masks"] = [kind.replace(" lengths", "").replace("lengths", "mask") for kind in step["masks"]]
        if model["crop"]:
            step["masks"] = [kind + " by rule" if kind == "masked" else kind for kind in step["masks"]]
        step["spoiled"] &= model["skips"]
        if model["compile"]:
            step |= {"checkpoint": "", "order": 1, "accumulate": False, "batches": 1}
        if step["checkpoint"] == "reentrant" or step["spoiled"] or model["dtype"] == "bfloat16":
            step["order"] = 1
        # Autograd cuts the graph of a second derivative where an empty view, as of a subclass, was written to in place.
        step["order"] = 1 if model["subclass"] and "in place" in model["activation"] else step["order"]
        if step["checkpoint"] == "reentrant" or step["order"] == 2 or not model["affine"]:
            step["input grad"] = True
        step["mode"] = "train" if is_negative else step["mode"]
        step["event"] = "" if step["event"] in left_out else step["event"]
    return model, steps


class Marked(torch.Tensor):
    """A tensor subclass without changes."""


class Mix(nn.Linear):
    """Maps 3 channels to 2 between two layers; with ``crop``, removes half of the last dimension."""

    def __init__(self, crop):
        super().__init__(3, 2, bias=False)
        self.crop = crop

    def forward(self, input):
        output = super().forward(input.movedim(1, -1)).movedim(-1, 1)
        return output[..., : (input.size(-1) + 1) // 2].contiguous() if self.crop else output


class Model(nn.Module):
    def __init__(self, traits, seed):
        super().__init__()
        options = traits["eps"], traits["momentum"], traits["affine"], traits["tracks"]
        parts = [
            (LAYERS[traits["dims"]](channels, *options), ACTIVATIONS[traits["activation"]](), Mix(traits["crop"]))
            for channels in (3, 2)[: traits["layers"]]
        ]
        self.body = nn.Sequential(*sum(parts, ())[:-1])
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.to(getattr(torch, traits["dtype"]))

    def forward(self, input, residual=None, masks=None):
        if residual is None and not masks:
            return self.body(input)
        first, *others = self.body
        output = first(input, residual, **(masks or {}))
        for module in others:
            output = module(output)
        return output


class Compiled(Model):
    """A separate class, since headers of compiled classes hold less."""


def draw_batch(seed, number, index, rank):
    """Returns input, residual and gradient of a rank, mask or lengths by name, and valid positions (N, 1, *)."""
    model, steps = program(seed)
    step, draw = steps[number], random.Random(f"{seed} {number} {index} {rank}")
    generator = torch.Generator().manual_seed(draw.getrandbits(32))  # its own in each thread
    is_alone = RANKS[seed % 4] == 1 or model["group"] == "alone" or step["mode"] == "eval"
    places = [draw.randint(1, 5) for _ in range(model["dims"] - 2)]
    size = [draw.choice((0, 2, 3) if is_alone else (0, 1, 2, 3)), 3, *places]
    tensors = [torch.randn(size, generator=generator) * 2 + 1 for _ in range(3)]
    kind, given, valid = step["masks"][rank], {}, torch.ones(size[0], 1, *places, dtype=torch.bool)
    if "lengths" in kind:
        given["lengths"] = torch.randint(places[-1] + 1, size[:1], generator=generator)
        valid &= torch.arange(places[-1]) < given["lengths"].view(-1, *[1] * (len(places) + 1))
    elif kind:
        sides = [side if draw.random() < 0.7 else 1 for side in places]
        given["mask"] = torch.rand(size[0], 1, *sides, generator=generator) < 0.6
        valid &= given["mask"]
    if kind and step["zero"][rank]:
        tensors[:2] = (tensor.masked_fill(~valid, torch.nan) for tensor in tensors[:2])
    if step["spoiled"] and valid.any():
        tensors[0][tuple(valid.nonzero()[0])] = torch.inf
    return *(tensor.to(getattr(torch, model["dtype"])) for tensor in tensors), given, valid


def differentiate(outputs, gradients, inputs, order):
    pairs = zip(outputs, gradients, strict=True)
    loss = sum((output * gradient[tuple(map(slice, output.shape))]).sum() for output, gradient in pairs)
    if order == 2:
        loss = loss + sum(grad.square().sum() for grad in torch.autograd.grad(loss, inputs, create_graph=True)) / 8
    loss.backward()


def numbers(model, outputs, leaves):
    """Returns outputs, gradients and buffers by name."""
    found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    leaves = {f"input or residual {index}": leaf for index, leaf in enumerate(leaves)} | dict(model.named_parameters())
    grads = {f"gradient of {name}": leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    return found | grads | {name: buffer.clone() for name, buffer in model.named_buffers()}


# The program on a rank.


def laid_out(tensor, layout):
    if layout == "sliced":
        return torch.stack([tensor, tensor], -1)[..., 0]
    last = {"contiguous": -1, "transposed": 0, "channels_last": 1}[layout]
    return tensor.movedim(last, -1).contiguous().movedim(-1, last)


def rule(given, shape):
    """Adapts lengths, and masks that do not fit, to the second layer."""
    if given.dim() == 1:
        return given.clamp(max=shape[-1])
    return given[..., : shape[-1]] if shape[1] == 2 else None


def look(module, args, output):
    """A hook that does nothing."""


def make(traits, seed, group):
    model = (Compiled if traits["compile"] else Model)(traits, seed)
    bagua_syncbn.convert_sync_batchnorm(model, group, skip_nonfinite=traits["skips"])
    for index in range(0, len(model.body), 3):
        model.body[index].eps_mode = traits["eps_mode"]
        if traits["computed by"] == "layer" and traits["activation"]:
            model.body[index].fused_activation, model.body[index + 1] = model.body[index + 1], nn.Identity()
    if traits["computed by"] == "fused" and traits["activation"]:
        bagua_syncbn.fuse_activations(model)
    return bagua_syncbn.recompute_outputs(model) if traits["recompute"] else model


def happen(event, model, input, groups):
    """Returns the model after an event between two steps. ``groups``: the groups of the program."""
    if event.startswith("freeze"):
        bagua_syncbn.freeze_statistics(model, lambda name, _: event == "freeze all" or name == "body.0")
    elif event == "unfreeze":
        bagua_syncbn.unfreeze_statistics(model)
    elif event == "merge":
        bagua_syncbn.merge_statistics(model, groups[0] if groups else None)
    elif event == "refuse":
        with pytest.raises(ValueError, match="expected"):
            model.train()(input.flatten())
    elif event == "hook" and dist.get_rank() == 0:
        model.body[1].register_forward_hook(look)
    elif event == "look" and dist.get_rank() == 0:
        with torch.no_grad():
            model.eval()(torch.ones(4, *input.shape[1:], dtype=input.dtype))
    elif event == "move":
        group = dist.new_group()
        for layer in model.body[::3]:
            layer.process_group = group
        for old in groups:
            dist.destroy_process_group(old)
        groups[:] = [group]
    copies = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
    return copies[event](model) if event in copies else model


def run(seed):
    """Returns the results of each thread; None for the first thread if options differ, since it must raise."""
    traits, _ = program(seed)
    bagua_syncbn.sync_group([[*range(dist.get_world_size())]])  # makes what layers without a given group have
    before = len(dist.distributed_c10d._world.pg_map)
    groups = [[dist.new_group()] if traits["group"] == "own" else [] for _ in range(1 + traits["threads"])]
    with ThreadPoolExecutor(2) as threads:
        results = list((threads.map if traits["threads"] else map)(partial(run_thread, seed), range(2), groups))
    while any(groups):  # no name here keeps one of them
        dist.destroy_process_group(max(groups, key=len).pop())
    gc.collect()
    left = len(dist.distributed_c10d._world.pg_map) - before
    assert left == 0, f"{left} groups are left of those that were destroyed"
    return results


def run_thread(seed, thread, groups):
    traits, _ = program(seed)
    odd = traits["odd"] if thread == 0 and dist.get_rank() == dist.get_world_size() - 1 else {}
    told = pytest.raises(RuntimeError, match="ranks made different calls")
    with told if traits["differs"] and thread == 0 else nullcontext():
        return train(seed, odd, groups)


def train(seed, odd, groups):
    (traits, steps), rank, results = program(seed), dist.get_rank(), []
    model = make(traits | odd, seed, groups[0] if groups else LOCAL if traits["group"] == "alone" else None)
    for number, step in enumerate(steps):
        model = happen(step["event"], model, draw_batch(seed, number, 0, rank)[0], groups)
        model.train(step["mode"] == "train").zero_grad()
        call, outputs, leaves, backwards = model, [], [], []
        if traits["compile"]:
            call = torch.compile(model, backend="eager", fullgraph=True)
        if step["checkpoint"]:
            call = partial(checkpoint, call, use_reentrant=step["checkpoint"] == "reentrant")
        with bagua_syncbn.accumulate_statistics(model) if step["accumulate"] else nullcontext():
            for index in range(step["batches"]):
                input, residual, gradient, masks, _ = draw_batch(seed, number, index, rank)
                input = laid_out(input, step["layout"]).as_subclass(
                    Marked if rank in traits["subclass"] else torch.Tensor
                )
                input.requires_grad_(step["input grad"])
                residual = residual.requires_grad_() if step["residual"] else None
                leaves += [input, residual] if step["residual"] else [input]
                kind, context, zero = step["masks"][rank], nullcontext(), {"zero_masked": step["zero"][rank]}
                if kind.startswith("masked"):
                    zero["rule"] = None if kind == "masked" else rule
                    context, masks = bagua_syncbn.masked(model, **masks, **zero), {}
                with context, torch.set_grad_enabled(step["backward"] != "none"):
                    outputs.append(call(input, residual, masks and masks | zero))
                    backwards.append(partial(differentiate, outputs[-1:], [gradient], [input], step["order"]))
                    if step["backward"] == "within":
                        backwards.pop()()
                if step["backward"] == "after":
                    backwards.pop()()
        for backward in backwards if step["backward"] == "last" else ():
            backward()
        results.append(numbers(model, outputs, leaves))
    return results


# The reference.


def reference(seed):
    """Yields the expected results of all ranks for each step."""
    (traits, steps), ranks = program(seed), range(RANKS[seed % 4])
    models, frozen = [Model(traits, seed).double() for _ in ranks], set()
    layers = range(0, 3 * traits["layers"], 3)
    for number, step in enumerate(steps):
        if step["event"] == "merge" and traits["tracks"]:
            for at in set(layers) - frozen:
                merge([model.body[at] for model in models])
        frozen = {"freeze one": frozen | {0}, "freeze all": {*layers}, "unfreeze": set()}.get(step["event"], frozen)
        outputs, leaves, counted = [[] for _ in ranks], [[] for _ in ranks], {}
        for model in models:
            model.zero_grad()
        for index in range(step["batches"]):
            batches = zip(*(draw_batch(seed, number, index, rank) for rank in ranks), strict=True)
            inputs, residuals, gradients, _, masks = map(list, batches)
            for rank in ranks:
                inputs[rank] = inputs[rank].double().requires_grad_(step["input grad"])
                residuals[rank] = residuals[rank].double().requires_grad_()
                leaves[rank] += [inputs[rank], residuals[rank]] if step["residual"] else [inputs[rank]]
            x = list(inputs)
            for at in layers:
                trains = step["mode"] == "train" and at not in frozen
                valid, kept = [], []
                for rank in ranks:
                    x[rank] = models[rank].body[at - 1](x[rank]) if at else x[rank]
                    everything = torch.ones_like(x[rank][:, :1], dtype=torch.bool)
                    is_masked = step["masks"][rank].startswith("" if at == 0 else "masked") and step["masks"][rank]
                    valid.append(masks[rank][..., : x[rank].size(-1)] if is_masked else everything)
                    kept.append(valid[rank] if step["zero"][rank] else everything)
                    x[rank] = x[rank].where(kept[rank], 0)
                for group in [ranks] if trains and traits["group"] != "alone" else [[rank] for rank in ranks]:
                    inside = torch.cat([values_of(x[rank], valid[rank]) for rank in group])
                    for rank in group:
                        layer, activation = models[rank].body[at : at + 2]
                        x[rank] = normalized(layer, x[rank], inside, trains, traits["eps_mode"])
                        if at == 0 and step["residual"]:
                            x[rank] = x[rank] + residuals[rank].where(kept[rank], 0)
                        x[rank] = activation(x[rank]).where(kept[rank], 0)
                        if trains and traits["tracks"]:
                            counted.setdefault(layer, []).append(inside.detach())
            if not step["accumulate"] or index == step["batches"] - 1:
                for layer, values in counted.items():
                    move(layer, torch.cat(values))
                counted = {}
            for rank in ranks:
                outputs[rank].append(x[rank])
            if step["backward"] != "none":
                differentiate(x, gradients, inputs, step["order"])
        yield [numbers(*own) for own in zip(models, outputs, leaves, strict=True)]


def normalized(layer, input, inside, trains, eps_mode):
    statistics = layer.running_mean, layer.running_var
    if trains or layer.running_mean is None:
        statistics = moments(inside)
    output = normalize(input, eps_mode, layer.eps, *statistics)
    return output * per_channel(layer.weight, input) + per_channel(layer.bias, input) if layer.affine else output


def merge(layers):
    tracked = torch.stack([layer.num_batches_tracked for layer in layers]).double()
    every = [torch.stack([layer.get_buffer(name) for layer in layers]) for name in ("running_mean", "running_var")]
    mean, var = mixture(*every, tracked)
    for layer in layers:
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_programs_equal_one_process(pool, seed):
    traits, steps = program(seed)
    print(seed, *({name: value for name, value in one.items() if value} for one in (traits, *steps)), sep="\n")
    threads = zip(*pool.run(run, RANKS[seed % 4], seed, timeout=300), strict=True)
    threads = [zip(*ranks, strict=True) for ranks in threads if ranks[0] is not None]
    for number, (*owns, wanted) in enumerate(zip(*threads, reference(seed), strict=True) if threads else ()):
        for own, rank in itertools.product(owns, range(RANKS[seed % 4])):
            assert own[rank].keys() == wanted[rank].keys(), f"rank {rank} at step {number}"
            for name, value in wanted[rank].items():
                is_spoiled = steps[number]["spoiled"] and name.startswith(("output", "gradient"))
                if value.numel() and not is_spoiled:
                    error = (own[rank][name].double() - value).abs().max() / max(1, value.abs().max())
                    what = f"{name} of rank {rank} at step {number}: expected {value}, got {own[rank][name]}"
                    assert error <= TOLERANCES[traits["dtype"]], what
