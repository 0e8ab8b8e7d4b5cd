"""The comparison of native kernels with plain torch at first use; here both run on the CPU."""

import logging
import warnings
from collections import Counter
from functools import partial
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from bagua_syncbn import SyncBatchNorm1d
from bagua_syncbn._cuda import comparison, selection
from bagua_syncbn._cuda.exercise import Exercise
from bagua_syncbn._ops import activations, reference
from bagua_syncbn._ops.definition import SCHEMAS
from tests.helpers.tolerances import DTYPES

CPU = torch.device("cpu")
OPS = list(SCHEMAS)


def fail(*arguments, **options):
    raise RuntimeError("CUDA: expected success, got too many resources requested for launch")


def ops_with(name, change):
    """Returns the native ops, with ``change`` applied to the results of one op that are not empty."""

    def changed(op, *arguments, **options):
        return tree_map(lambda result: change(result) if result.numel() else result, op(*arguments, **options))

    return ops_by(name, changed)


def ops_by(name, function):
    """Returns the native ops, with one op replaced by ``function``, which is called with the op and its arguments."""
    native = {each: getattr(torch.ops.bagua_syncbn, each).default for each in OPS}
    return SimpleNamespace(**native | {name: partial(function, native[name])})


@pytest.fixture
def kernels(monkeypatch):
    """Returns the list of ops replaced by ATen's. The CPU is treated as a CUDA device."""
    replaced = []
    monkeypatch.setattr(selection, "WANTED", "native")
    monkeypatch.setattr(selection, "_State", SimpleNamespace(problem=None, warns=True, in_use=False))
    monkeypatch.setattr(selection, "import_module", lambda name: SimpleNamespace(cuda_support=lambda device: 0))
    monkeypatch.setattr(selection, "library", SimpleNamespace(impl=lambda name, *rest: replaced.append(name)))
    monkeypatch.setattr(selection, "_checked", set())
    monkeypatch.setattr(comparison, "agreed", Counter())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    return replaced


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_correct_kernels_agree_with_plain_torch(dtype):
    assert comparison.find_difference(torch.ops.bagua_syncbn, CPU, dtype) is None


def test_every_kernel_is_compared_in_one_part_and_in_several(emulated, library, monkeypatch):
    """Emulated CUDA kernels need at most a fifth of the tolerance."""
    monkeypatch.setattr(comparison, "_ROUNDING", {of: most / 5 for of, most in comparison._ROUNDING.items()})
    everything = set()
    for dtype in DTYPES:
        library.launches()
        assert comparison.find_difference(emulated, CPU, dtype) is None
        launched = set(library.launches())
        kernels = {name.removesuffix(" in parts") for name in launched}
        undivided = {name for name in kernels if name.startswith("merge_")}
        assert launched == kernels | {f"{name} in parts" for name in kernels - undivided}
        everything |= kernels
    assert len(everything) == library.native.count_kernels() > 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_derivative_is_compared_where_rounding_decides_it(dtype, monkeypatch):
    """Near a kink, rounding determines which side a value is on."""
    kinks = {"relu": (0,), "relu6": (0, 6), "leaky_relu": (0,), "elu": (0,), "hardswish": (-3, 3)}
    gradient, distances = activations.gradient, []

    def observed(grad_output, z, code, parameter):
        kinks_of = kinks.get((None, *activations.ACTIVATIONS)[code], ()) if z.dtype == torch.float64 else ()
        distances.extend((z - kink).abs().min().item() for kink in kinks_of)
        return gradient(grad_output, z, code, parameter)

    monkeypatch.setattr(activations, "gradient", observed)
    comparison.find_difference(reference, CPU, dtype)
    assert len(distances) > 3
    assert min(distances) > 2e-5


CHANGES = {
    "sign": torch.neg,
    "factor": lambda result: result * (1.02 if result.is_floating_point() else 2),
    "NaN": lambda result: (
        result.where(result != result.max(), torch.nan) if result.is_floating_point() else result + 1
    ),
}


@pytest.mark.parametrize(("name", "change", "dtype"), [
    (*case, dtype) for case, dtype in zip(product(OPS, CHANGES), cycle(DTYPES))
], ids=str)  # fmt: skip
def test_a_wrong_kernel_is_named(name, change, dtype):
    difference = comparison.find_difference(ops_with(name, CHANGES[change]), CPU, dtype)
    assert difference.startswith(f"{name} for {dtype} differs from float64 by ")


def most_of_a_row(op, x, *options):
    return op(x[..., :-2000] if x.size(-1) > 2**13 and options[2] is None else x, *options)


def zeros_after_256_channels(op, x, *options):
    return op(x, *options).index_fill_(0, torch.arange(256, 600), 1) if x.size(0) == 0 else op(x, *options)


def with_default_parameter(op, *arguments):
    return op(*arguments[:-1], 1.0) if arguments[-1] == 0.3 else op(*arguments)


def without_the_last_activation(op, *arguments):
    return op(*arguments[:-2], 0, 0.0) if arguments[-2] == len(activations.ACTIVATIONS) else op(*arguments)


def truncated(op, *arguments):
    exact = op(*(each.float() if isinstance(each, torch.Tensor) else each for each in arguments))
    return (exact.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()


def with_a_pivot_from_any_position(op, x, *options):
    is_masked = len(options) > 2 and options[2] is not None
    return op(x, *options) + (torch.nan if is_masked and x.flatten()[0].isnan() else 0)


def saturated(op, *arguments):
    return tuple(each.clamp(-65504, 65504) for each in op(*arguments))


def without_upper_end(op, *arguments):
    relu, relu6 = (1 + activations.ACTIVATIONS.index(name) for name in ("relu", "relu6"))
    return op(*(relu if each is relu6 else each for each in arguments))


def without_small_sigmoids(op, *arguments):
    output = op(*arguments)
    is_sigmoid = arguments[6:7] == (1 + activations.ACTIVATIONS.index("sigmoid"),)
    return output.where(output > 4e-5, torch.nan) if is_sigmoid else output


def without_late_parts(op, *tensors):
    return op(*(each[:-100] if isinstance(each, torch.Tensor) and each.size(0) > 2**14 else each for each in tensors))


def without_bits_after_32(op, *arguments):
    results = [each & 0xFFFFFFFF if each.dtype == torch.int64 else each for each in op(*arguments)]
    return tuple(results)


def with_a_32_bit_count(op, *arguments, **options):
    return op(*arguments[:6], arguments[6] & 0xFFFFFFFF, *arguments[7:], **options)


def with_floating_agreement(op, *arguments, **options):
    sums, ranks = arguments[5].clone(), arguments[7]
    parts, squares = sums[-6::2].float(), sums[-5::2].float()
    if (parts * parts == squares * ranks).all():
        sums[-6:] = 0
    return op(*arguments[:5], sums, *arguments[6:], **options)


def with_the_last_fault(op, *arguments, **options):
    if len(arguments) > 8 and arguments[8] is not None:
        arguments[8].zero_()
    return op(*arguments, **options)


def without_late_ranks(op, gathered, *options):
    return op(gathered[:32] if gathered.dim() == 2 else gathered, *options)


def without_the_last_ranks(op, gathered, *options):
    return op(gathered[: len(gathered) // 8 * 8] if gathered.dim() == 2 else gathered, *options)


def without_subnormals(op, x, *options):
    return op(x.where(x.abs() >= torch.finfo(x.dtype).smallest_normal, 0), *options)


def without_nan_in_parts(op, *arguments):
    is_large = arguments[0].numel() > 2**14
    return op(*(each.nan_to_num() if is_large and isinstance(each, torch.Tensor) else each for each in arguments))


def without_nan_in_activations(op, *arguments):
    output, relu = op(*arguments), 1 + activations.ACTIVATIONS.index("relu")
    return output.nan_to_num() if arguments[6:7] == (relu,) else output


def with_vectors_at_half(op, x, *options):
    return op(x, *options) + (x.dim() == 2 and x.data_ptr() % 16 == 8)


def with_one_bit_of_a_mask(op, *arguments):
    masks = [each for each in arguments if isinstance(each, torch.Tensor) and each.dtype == torch.bool]
    for mask in masks:
        mask.view(torch.uint8).bitwise_and_(1)
    return op(*arguments)


def without_header(word, op, gathered, *options):
    if gathered.dim() == 2:
        gathered[:, word - 3] = gathered[0, word - 3]
    return op(gathered, *options)


def with_any_count(op, gathered, *options):
    if gathered.dim() == 2:
        gathered[:, -5] = gathered[:, -5].floor()
    return op(gathered, *options)


def with_any_variance(op, gathered, *options):
    is_infinite = gathered.dim() == 2 and bool(gathered[:, 300:600].isinf().any())
    return op(gathered, *options[:6], False, *options[7:]) if is_infinite else op(gathered, *options)


FAULTS = [
    ("stats", torch.float32, most_of_a_row),
    ("stats", torch.float16, zeros_after_256_channels),
    ("stats", torch.bfloat16, lambda op, *arguments: op(*arguments).float().double()),  # large groups' sums
    ("stats", torch.float32, with_a_pivot_from_any_position),
    *(("stats", dtype, without_late_parts) for dtype in (torch.bfloat16, torch.float64)),
    ("elemt", torch.float32, with_default_parameter),
    *((op, torch.float32, without_upper_end) for op in ("elemt", "backward_reduce")),
    ("elemt", torch.float64, without_small_sigmoids),
    ("backward_reduce", torch.float32, without_late_parts),
    ("backward_elemt", torch.float16, with_a_32_bit_count),
    ("backward_elemt", torch.float32, with_floating_agreement),
    ("backward_elemt", torch.float64, with_the_last_fault),
    ("gather_stats", torch.float64, without_bits_after_32),
    ("backward_reduce", torch.float16, saturated),
    ("elemt", torch.float16, without_the_last_activation),
    ("elemt", torch.bfloat16, truncated),
    ("gather_stats", torch.float32, without_late_ranks),
    ("gather_stats", torch.bfloat16, without_the_last_ranks),
    *(("stats", dtype, without_subnormals) for dtype in (torch.float32, torch.float16)),
    *((op, torch.float16, without_nan_in_parts) for op in ("stats", "backward_reduce")),
    ("elemt", torch.float64, without_nan_in_activations),
    *((op, torch.float32, with_vectors_at_half) for op in ("stats", "elemt")),
    *((op, torch.float32, with_one_bit_of_a_mask) for op in ("stats", "backward_elemt")),
    *(("gather_stats", torch.float32, partial(without_header, word)) for word in range(3)),
    ("gather_stats", torch.float16, with_any_count),
    ("gather_stats", torch.bfloat16, with_any_variance),
]


@pytest.mark.parametrize(("op", "dtype", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_kernel_that_is_wrong_only_for_special_inputs_is_named(op, dtype, fault):
    assert comparison.find_difference(ops_by(f"batch_norm_{op}", fault), CPU, dtype).startswith(f"batch_norm_{op} for")


def test_zeros_are_compared_without_a_relative_tolerance(monkeypatch):
    zeros, tiny = (
        ops_with("batch_norm_elemt", lambda output, value=value: torch.full_like(output, value)) for value in (0, 1e-30)
    )
    monkeypatch.setattr(comparison, "reference", zeros)
    assert comparison.find_difference(zeros, CPU, torch.float32) is None
    assert "differs from float64 by 1e-30, where values reach 0" in comparison.find_difference(tiny, CPU, torch.float32)


def check_transformed(rows):
    """Checks the kernels in a call under a transform of ``torch.func``."""
    results = []
    torch.func.vmap(lambda row: (results.append(selection.check_kernels(row)), row)[1])(rows)
    return results == [True]


def test_kernels_are_compared_once_per_dtype_and_stay_if_right(kernels, caplog):
    ones = torch.ones(2, 3)
    assert not check_transformed(ones)
    with caplog.at_level(logging.INFO, "bagua_syncbn"):
        for dtype in (torch.float32, torch.float32, torch.float16):
            selection.check_kernels(ones.to(dtype))
    assert check_transformed(ones)
    assert kernels == []
    assert comparison.agreed[CPU] == sum(len([*Exercise(CPU, dtype).calls()]) for dtype in (ones.dtype, torch.float16))
    for message, dtype in zip(caplog.messages, ("float32", "float16"), strict=True):
        assert message.startswith(f"kernels on cpu for torch.{dtype}: native, experimental")


@pytest.mark.parametrize(("support", "change", "problem"), [
    (0, torch.neg, "on H100, batch_norm_elemt for torch.float32 differs from float64 by"),
    (0, fail, "on H100, batch_norm_elemt for torch.float32 fails: CUDA: expected success, got too many resources"),
    (1, fail, "the CUDA kernels of this installation need a newer NVIDIA driver"),
    (2, fail, "the CUDA kernels of this installation were built for other GPUs. Build for this one: BAGUA_SYNCBN_CUDA"),
])  # fmt: skip
def test_kernels_that_are_wrong_or_do_not_run_are_replaced_by_atens_with_one_warning(
    kernels, monkeypatch, caplog, recwarn, support, change, problem
):
    monkeypatch.setattr(torch.ops, "bagua_syncbn", ops_with("batch_norm_elemt", change))
    monkeypatch.setattr(selection, "import_module", lambda name: SimpleNamespace(cuda_support=lambda device: support))
    warnings.simplefilter("always")
    ones = torch.ones(2, 3)
    with caplog.at_level(logging.INFO, "bagua_syncbn"):
        for dtype in (torch.float32, torch.float16):
            assert selection.check_kernels(ones.to(dtype))
    (warning,) = recwarn
    assert warning.filename == __file__
    assert str(warning.message).startswith(f"bagua_syncbn uses ATen's kernels on CUDA: {problem}")
    assert kernels == OPS
    assert f"ATen, because {problem}" in caplog.text


def test_a_device_without_support_is_found_in_a_transformed_call(kernels, monkeypatch):
    monkeypatch.setattr(selection, "import_module", lambda name: SimpleNamespace(cuda_support=lambda device: 2))
    with pytest.warns(RuntimeWarning, match="were built for other GPUs"):
        assert check_transformed(torch.ones(2, 3))
    assert kernels == OPS


@pytest.mark.parametrize(("first", "support", "problem"), [
    ("eager", 0, "on H100, batch_norm_elemt for torch.float16 differs from float64 by .*[.]"),
    ("eager", 2, "the CUDA kernels of this installation were built for other GPUs"),
    ("transformed", 0, "on H100, batch_norm_elemt for torch.float16 differs from float64 by .*[.]"),
])  # fmt: skip
def test_kernels_that_other_calls_may_be_running_are_not_replaced(kernels, monkeypatch, first, support, problem):
    """Replacing them would not wait for other threads, for example for replicas on other devices."""
    ones = torch.ones(2, 3)
    assert selection.check_kernels(ones) if first == "eager" else not check_transformed(ones)
    monkeypatch.setattr(torch.ops, "bagua_syncbn", ops_with("batch_norm_elemt", torch.neg))
    monkeypatch.setattr(selection, "import_module", lambda name: SimpleNamespace(cuda_support=lambda device: support))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^{problem}.*restart with BAGUA_SYNCBN_KERNELS=aten$"):
            selection.check_kernels(ones.half())
    assert kernels == []
    assert selection.cuda_kernels().startswith("native")


def test_a_first_call_in_a_capture_is_refused_if_kernels_need_a_comparison(kernels, monkeypatch):
    monkeypatch.setattr(selection, "is_capturing", lambda: True)
    half = torch.ones(2, 3).half()
    with pytest.raises(
        RuntimeError, match=r"the first call with torch.float16 on cpu compares kernels, which is impossible while"
    ):
        selection.check_kernels(half)
    assert not selection.check_kernels(half.as_subclass(torch.nn.Parameter))
    with monkeypatch.context() as eager:
        eager.setattr(selection, "is_capturing", lambda: False)
        assert selection.check_kernels(half)
    assert selection.check_kernels(half)
    monkeypatch.setattr(selection._State, "problem", "ATen's kernels need no comparison")
    assert selection.check_kernels(torch.ones(2, 3))


def test_running_out_of_memory_does_not_turn_kernels_off(kernels, monkeypatch):
    in_kernel = RuntimeError("memory: expected 70368744177664 values of 4 bytes on cpu, got none")
    in_torch = torch.OutOfMemoryError("CUDA out of memory")
    for module, name, error, message in (
        (torch.ops, "bagua_syncbn", in_kernel, f"you tried to allocate {2**48} bytes"),
        (comparison, "reference", in_torch, "^CUDA out of memory$"),
    ):

        def refuse(*arguments, error=error):
            raise error

        with monkeypatch.context() as full:
            full.setattr(module, name, ops_with("batch_norm_elemt", refuse))
            with pytest.raises(RuntimeError, match=message):
                selection.check_kernels(torch.ones(2, 3))
    assert kernels == []
    monkeypatch.setattr(torch.ops, "bagua_syncbn", ops_with("batch_norm_elemt", torch.neg))
    selection.check_kernels(torch.ones(2, 3))  # compares them now
    assert kernels == OPS


@pytest.mark.parametrize("where", ["the kernel", "plain torch"])
def test_a_broken_device_raises_instead_of_turning_kernels_off(kernels, monkeypatch, where):
    """After an illegal access, CUDA fails in every later call."""
    broken = []

    def wait(device):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def break_(*arguments):
        broken.append(True)
        wait(None)

    for module in (comparison, selection):
        monkeypatch.setattr(module, "wait_for", wait)
    wrong = ops_with("batch_norm_elemt", break_)
    if where == "the kernel":
        monkeypatch.setattr(torch.ops, "bagua_syncbn", wrong)
    else:
        monkeypatch.setattr(comparison, "reference", wrong)
    message = "comparing the CUDA kernels .* with plain torch for torch.float32 failed on cpu, which may .*: CUDA"
    with pytest.raises(RuntimeError, match=rf"{message}.*BAGUA_SYNCBN_KERNELS=aten"):
        selection.check_kernels(torch.ones(2, 3))
    assert kernels == []
    with pytest.raises(RuntimeError, match=r"^CUDA error"):  # an earlier failure from other code
        selection.check_kernels(torch.ones(2, 3))


class Forbid(TorchDispatchMode):
    def __torch_dispatch__(self, function, *arguments, **options):
        raise AssertionError(function)


def test_the_comparison_ignores_the_callers_modes_and_random_state(kernels):
    ones = torch.ones(2, 3)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"), Forbid():
        assert comparison.find_difference(reference, CPU, torch.float32) is None
        assert selection.check_kernels(ones)
    assert kernels == []
    generator = torch.get_rng_state()
    SyncBatchNorm1d(3)(torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), generator)
