"""What holds of every function that reads the heads of a model, whatever it computes of them."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from benchmarks.peak import peak_memory
from heads_kernels.backends import CPU_MISSING
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.model_state import state
from tests.support.nn_layers import Layers, spread
from tests.support.refusals import assert_refused

Heads = tuple[tuple[str, int], ...]  # a layer's name and a head each
Found = dict[tuple[str, Heads], Tensor]


# ---------------------------------------------------------------------- the functions, each as {(what, heads): value}
def real_rows(batch: dict[str, Tensor]) -> Tensor:
    return batch.get("decoder_attention_mask", batch["attention_mask"]).bool()


def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """`[B]`, of real tokens."""
    values = model(**batch)[0].double()
    return values.square().where(real_rows(batch)[..., None], 0.0).sum((1, 2)) / 10


def relevant(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The first two real positions, each with its largest score."""
    values, real = model(**batch)[0], real_rows(batch)
    real = real & (real.cumsum(1) <= 2)
    largest = nn.functional.one_hot(values.argmax(-1), values.shape[-1])
    return values, (largest * real[..., None]).to(values.dtype)


def by_head(scores: hk.analysis.HeadScores, what: str) -> Found:
    each = zip(scores.layers, scores.scores, strict=True)
    return {(what, ((n, h),)): value for n, of in each for h, value in enumerate(of)}


def statistics(model: Any, data: Any, **options: Any) -> Found:
    sets = {"some": list(range(5, 15))}
    read = hk.analysis.statistics(model, data, token_sets=sets, exclude_keys=[7], **options)
    found = {}
    for what, scores in read.measures.items():
        found |= by_head(scores, what)
    for name, counts in zip(read.confidence.layers, read.offsets, strict=True):
        for h, of_head in enumerate(nn.functional.pad(counts, (5, 5))):
            middle = len(of_head) // 2  # as many as the longest row has, on either side
            found["offsets", ((name, h),)] = of_head[middle - 5 : middle + 6]
    return found


def importance(model: Any, data: Any, **options: Any) -> Found:
    return by_head(hk.analysis.importance(model, data, losses, **options), "importance")


def relevance(model: Any, data: Any, **options: Any) -> Found:
    return by_head(hk.analysis.relevance(model, data, relevant, **options), "relevance")


def roles(model: Any, data: Any, **options: Any) -> Found:
    pairs = [{"x": [(0, 3)]}, {"x": [(2, 1)], "y": [(1, 2)]}]
    counts = {token: token % 7 for token in range(40)}
    asked: Any = {"relations": pairs, "counts": counts, "common": 9, "special": [8]}
    read = hk.analysis.roles(model, data, **asked, **options)
    found = by_head(read.offset_share, "share")
    for of in read.relations:
        found |= by_head(of.accuracy, f"{of.name} {of.direction} {of.offset} {of.baseline}")
    found |= by_head(read.rare_words.rarest, f"rarest {read.rare_words.chance}")
    return found | by_head(read.rare_words.two_rarest, "two rarest")


def distance(model: Any, data: Any, **options: Any) -> Found:
    found: Found = {}
    for kind in dict.fromkeys(layer.kind for layer in hk.heads.attention_layers(model)):
        read = hk.analysis.distance(model, data, kind=kind, **options)
        heads = [(read.layers[layer], head) for layer, head in read.heads]
        for a, row in zip(heads, read.matrix, strict=True):
            found |= {("distance", (a, b)): value for b, value in zip(heads, row, strict=True)}
    return found


def maps(model: Any, data: Any) -> Found:
    found: Found = {}
    examples = 0
    for batch in data:
        for example in range(len(batch["input_ids"])):
            for read in hk.analysis.maps(model, batch, example=example):
                for head, of_head in zip(read.heads, read.maps, strict=True):
                    found[f"map {examples}", ((read.layer, head),)] = of_head.double()
            examples += 1
    return found


def received(model: Any, data: Any) -> Found:
    read, found = hk.analysis.received(model, data), {}
    for name, examples in zip(read.layers, read.examples, strict=True):
        for example, of_heads in enumerate(examples):
            what = f"received {example}"
            found |= {(what, ((name, h),)): of for h, of in enumerate(of_heads.double())}
    return found


READ: dict[str, Callable[..., Found]] = {
    "statistics": statistics,
    "gradient": partial(importance, method="gradient"),
    "gradient by token": partial(importance, method="gradient", reduce="token"),
    "fisher": partial(importance, method="fisher"),
    "leave one out": partial(importance, method="leave_one_out"),
    "relevance": relevance,
    "full relevance": partial(relevance, attention="full"),
    "roles": roles,
    "distance": distance,
    "received": received,
    "maps": maps,
}
#: Those whose scores of closed heads are 0.
OF_GATES = ("gradient", "gradient by token", "fisher", "leave one out", "relevance")
VARIANTS = ("gradient by token", "full relevance")
each_function = pytest.mark.parametrize("name", [name for name in READ if name not in VARIANTS])


# ---------------------------------------------------------------------- models and sentences
def model_of(family: str = "bert", **changes: Any) -> Any:
    made = tiny_models.unpooled(tiny_models.build(family, **changes)).double()
    return hk.integrations.transformers.use(made)


SENTENCES = torch.tensor([9, 21, 5, 14]), torch.tensor([7, 30, 12])


def batch_of(*sentences: Tensor, family: str = "bert", left: int = 0, right: int = 0) -> Any:
    """Padded to one length by `left` and `right` tokens, the target of a translation the other way round."""
    longest = max(len(each) for each in sentences)

    def padded(rows: list[Tensor], left: int, right: int, value: int) -> Tensor:
        missing = [longest - len(each) for each in rows]
        sides = [(left + n, right) if left else (0, right + n) for n in missing]
        pad = nn.functional.pad
        return torch.stack([pad(e, side, value=value) for e, side in zip(rows, sides, strict=True)])

    rows, ones = list(sentences), [torch.ones_like(each) for each in sentences]
    batch = {"input_ids": padded(rows, left, right, 33), "attention_mask": padded(ones, left, right, 0)}
    if family == "t5":  # whose positions are relative
        target = {"input_ids": padded(rows, right, left, 30), "attention_mask": padded(ones, right, left, 0)}
        return batch | {f"decoder_{key}": value for key, value in target.items()}
    places = [torch.arange(len(each)) for each in sentences]
    return batch | {"position_ids": padded(places, left, right, 7)}


# ---------------------------------------------------------------------- what must not matter
@pytest.mark.parametrize(
    ("name", "family"), [*((name, "bert") for name in READ), *((name, "t5") for name in READ if "relev" not in name)]
)
def test_padding_and_the_cut_into_batches(name: str, family: str) -> None:
    """Sentences one by one and unpadded, or in one batch, padded on any side."""
    model = model_of(family)
    alone = READ[name](model, [batch_of(each, family=family) for each in SENTENCES])
    assert alone
    for left, right in ((0, 2), (2, 0), (1, 2)):
        together = READ[name](model, [batch_of(*SENTENCES, family=family, left=left, right=right)])
        assert_alike(together, alone, dtype=torch.float32)


def towers(model: Any) -> Any:
    """A model of which a part does not run on the data."""
    made = nn.ModuleDict({"idle": hk.nn.GatedMultiheadAttention(8, 2), "model": model})
    made.forward = lambda **batch: model(**batch)
    return made


# Others take no `layers`, and read all.
@pytest.mark.parametrize("name", [name for name in READ if name not in ("maps", "received", *VARIANTS)])
def test_some_layers(name: str) -> None:
    """They read what they read among all, also where the data do not reach the others, whose scores are 0."""
    model, data = model_of(), [batch_of(*SENTENCES)]
    second = hk.heads.attention_layers(model)[1].name
    expected = {
        (what, tuple((f"model.{layer}", head) for layer, head in heads)): value
        for (what, heads), value in READ[name](model, data).items()
        if {layer for layer, _ in heads} == {second}
    }
    assert_alike(READ[name](towers(model), data, layers=[f"model.{second}"]), expected)
    if name in ("statistics", "roles"):
        words = ".*reaches layer 0 \\('idle'\\); .* or name the others in layers"
        assert_refused(((towers(model), data), words), of=READ[name])
    if name in OF_GATES and name != "relevance":
        reached = {heads[0][0] for (_, heads), value in READ[name](towers(model), data).items() if value != 0}
        assert reached == {f"model.{layer.name}" for layer in hk.heads.attention_layers(model)}


@pytest.mark.parametrize("name", READ)
def test_closed_heads_are_pruned_heads(name: str) -> None:
    """Also all heads of a layer; biases of the output projection would go to its inputs, whose number changes."""
    model, data = model_of(), [batch_of(*SENTENCES)]
    for layer in hk.heads.projected_layers(model):
        nn.init.zeros_(layer.output.linear.bias)
    hk.heads.close(model, {0: [0, 2], 1: range(4)})
    first, second = (layer.name for layer in hk.heads.attention_layers(model))
    before = READ[name](model, data)
    if name in OF_GATES:
        zero = {heads[0] for (_, heads), value in before.items() if value == 0}
        assert zero == {(first, 0), (first, 2), *((second, head) for head in range(4))}
    now = {(first, 1): (first, 0), (first, 3): (first, 1)}
    expected = {
        (what, tuple(now[head] for head in heads)): value
        for (what, heads), value in before.items()
        if all(head in now for head in heads)
    }
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(READ[name](model, data), expected, dtype=torch.float32)


@each_function
def test_dropout_and_what_the_caller_records(name: str) -> None:
    """Evaluation mode, and gradients where they are needed."""
    dropout = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.5}
    model, data = model_of(**dropout), [batch_of(*SENTENCES)]
    expected = READ[name](model, data)
    with torch.inference_mode():
        assert_alike(READ[name](model.train(), data), expected)


@each_function
def test_half_precision(name: str) -> None:
    """What chooses the largest of two nearly equal probabilities may choose another key."""
    model, data = model_of(), [batch_of(*SENTENCES)]
    model.bfloat16()
    expected = READ[name](copy.deepcopy(model).double(), data)
    found = READ[name](model, data)
    if name == "roles":
        assert all(0 <= value <= 1 for value in found.values())
        return
    keys = [key for key in expected if key[0] != "offsets"]
    assert_alike([found[k] for k in keys], [expected[k] for k in keys], dtype=torch.bfloat16)


@each_function
def test_weights_of_inference_mode(name: str) -> None:
    """They are read too, where no gradient is asked for."""
    with torch.inference_mode():
        model, stock = model_of(), model_of()
    data = [batch_of(*SENTENCES)]
    if name in ("gradient", "fisher"):
        with pytest.raises(ValueError, match=r"model has weights of inference mode"):
            READ[name](model, data)
    elif name != "relevance":
        assert_alike(READ[name](model, data), READ[name](copy.deepcopy(stock), data))


def calibrate(model: Any, data: Any) -> dict[str, Any]:
    return {name: [m.query_outer, m.key_outer] for name, m in hk.convert.calibrate(model, data, progress=False).items()}


#: Those of `hk.convert` too.
READINGS: dict[str, Callable[..., Any]] = READ | {
    "calibrate": calibrate,
    "curves": lambda model, data: list(hk.convert.curves(model, data, progress=False).errors),
}
each_reading = pytest.mark.parametrize("name", [name for name in READINGS if name not in VARIANTS])


@each_reading
def test_a_pass_of_another_thread(name: str) -> None:
    """Between the projections and the operator it runs the gates and modules that are looked at, and is not read."""
    model, data = model_of(), [batch_of(*SENTENCES)]
    others = batch_of(*(each.flip(0) for each in SENTENCES))
    expected, alone = READINGS[name](model, data), model(**others)[0].detach()
    passes: list[Tensor] = []

    def run(*_: object) -> None:
        found = ThreadPoolExecutor(1).submit(model, **others).result()[0]
        assert_alike(found.detach(), alone)
        passes.append(found)

    with hk.analysis.observe(model, run):
        assert_alike(READINGS[name](model, data), expected)
    assert passes


# ---------------------------------------------------------------------- put back
@each_reading
def test_the_model_is_put_back(name: str) -> None:
    """Modes, what asks for gradients, gates, observers and hooks; also after Ctrl-C in the last pass or in the data."""
    read = READINGS[name]
    model, data = model_of(), [batch_of(*SENTENCES)]
    model.train().encoder.layer[1].eval()
    model.embeddings.requires_grad_(False)
    hk.heads.close(model, {0: [1]})

    def all_of_it() -> list[Any]:
        return [*state(model), *((p.requires_grad, p.grad) for p in model.parameters())]

    passes: list[int] = []

    def look(*_: object) -> None:
        assert not model.training
        assert not any(part.training for part in model.modules() if isinstance(part, nn.Dropout))
        assert not any(parameter.requires_grad for parameter in model.parameters())
        passes.append(1)
        if len(passes) == last:
            raise KeyboardInterrupt

    def interrupted() -> Iterator[Any]:
        yield from data
        raise KeyboardInterrupt

    last = 0
    model.encoder.layer[1].register_forward_hook(look)
    before = all_of_it()
    read(model, data)
    assert passes
    assert all_of_it() == before
    last, passes[:] = len(passes), []
    for given in (data, interrupted()):
        with pytest.raises(KeyboardInterrupt):
            read(model, given)
        assert all_of_it() == before
        last = 0


FIRST = {"first": lambda batch: torch.arange(batch.shape[1])[None] == 0}
#: Layers, tokens, and the MiB that reading them may take: maps would take 64 and 69.
MEMORY: dict[str, tuple[Callable[..., Any], int, int, int]] = {
    "statistics": (partial(hk.analysis.statistics, token_sets=FIRST), 1, 2048, 16),
    "distance": (hk.analysis.distance, 2, 1500, 24),
}


@pytest.mark.skipif(CPU_MISSING != "", reason="the formula holds maps")
@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_bounded(name: str) -> None:
    read, layers, T, most = MEMORY[name]
    model = Layers(*(spread(hk.nn.GatedMultiheadAttention(16, 4)) for _ in range(layers)))
    x = torch.randn(1, T, 16)
    read(model, [x[:, :200]])
    assert peak_memory(lambda: read(model, [x])).extra < most << 20


# ---------------------------------------------------------------------- what is refused
@each_function
def test_bad_input(name: str) -> None:
    """`maps` takes a batch."""
    model, stock, data = model_of(), tiny_models.build("bert"), [batch_of(*SENTENCES)]
    hidden = data[0] | {"attention_mask": torch.zeros_like(data[0]["attention_mask"])}
    rows = [
        ((model, []), "data has no batches"),
        ((model, iter(())), "data has no batches"),
        ((model, data[0]), TypeError, r"data is a dict; .*\[batch\] for a single one"),
        ((model, torch.ones(2, 3)), TypeError, "data is a Tensor"),
    ]
    rows = [] if name == "maps" else rows
    rows += [((stock, data), r".*call hk\.integrations\.transformers\.use\(model\) first")]
    if name in ("statistics", "relevance", "distance", "maps"):  # which need tokens
        words = "data has no (token that reaches|example that counts|real token)|.*is padding alone"
        rows += [((model, [hidden]), words)]
    assert_refused(*rows, of=READ[name], unchanged=[model, stock])
    hk.heads.prune(model, {0: range(4), 1: range(4)})
    if name in ("gradient", "leave one out", "distance"):
        assert_refused(((model, data), r"model has no heads? left in its"), of=READ[name])


def test_text() -> None:
    model, read = nn.Sequential(hk.nn.GatedMultiheadAttention(8, 2)), hk.analysis
    for function in (read.statistics, read.relevance, read.roles, read.distance, read.maps):
        assert_refused(((model, ["a sentence"]), TypeError, "batch is text; pass the output of the tok"), of=function)
