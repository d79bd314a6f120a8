"""A gated language model on many processes: data, tensor and context parallelism, pruning, and a checkpoint.

    torchrun --nproc-per-node 4 examples/distributed/train.py --mesh 1 2 2
    torchrun --nproc-per-node 2 examples/distributed/train.py --mesh 2 1 1 --folder checkpoint

`--mesh` is the number of processes that split the batch, the heads and features, and the sequences. A small Transformer
learns the text of `pydoc_data.topics`, which comes with Python, and a schedule of L0 gates closes some of its heads.
The sharded model is then gathered, pruned, sharded again, saved with the shapes of its heads, and loaded on another
mesh, on which all processes split the batch. The losses are the same on any mesh.

Processes compute on the CPU, with gloo. Exit status: 0; 2 for a bad option.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import heads_kernels as hk
from heads_kernels.integrations.distributed import ContextParallel, context_parallel, gather, tensor_parallel_plan

#: What the dimensions of a mesh split: the batch, heads and features, sequences.
NAMES = ("dp", "tp", "cp")


@dataclass(frozen=True)
class Settings:
    """The settings of a run, without the mesh."""

    layers: int = 2
    heads: int = 8
    width: int = 64
    length: int = 64
    batch: int = 16
    steps: int = 60
    rate: float = 1e-3
    gate_rate: float = 0.05  # of log_alpha, which must change a lot
    open_heads: int = 10  # of all layers, at the end
    method: str = "all_gather"
    seed: int = 0


class Block(nn.Module):
    """Attention and feed-forward layer, each on a normalised input and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = hk.nn.GatedMultiheadAttention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), is_causal=True)[0]
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class CharLM(nn.Module):
    """Logits of the next character, `[B * T, characters]`, from characters `[B, T]` and their positions `[T]`."""

    def __init__(self, characters: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(settings.length, width)
        self.blocks = nn.Sequential(*(Block(width, settings.heads) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, characters)

    def forward(self, text: Tensor, positions: Tensor) -> Tensor:
        x = self.characters(text) + self.positions(positions)
        return self.logits(self.norm(self.blocks(x)).flatten(0, 1))


class Run:
    """A model, split over a mesh."""

    def __init__(self, model: CharLM, mesh: DeviceMesh, settings: Settings) -> None:
        self.model, self.mesh, self.settings = model, mesh, settings
        plan = tensor_parallel_plan(model, mesh["tp"])
        plan |= {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        # Operators get DTensors over tp, and split their sequences over cp.
        context_parallel(model, mesh["tp", "cp"], settings.method)
        # Gradients are those of a process's batch and tokens: averaged over dp and cp.
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp", "cp"])
        fully_shard(model, mesh=mesh["dp", "cp"])
        self.context = ContextParallel(mesh["cp"])

    def loss(self, windows: Tensor) -> Tensor:
        """Mean loss of this process's tokens, of windows `[B, length + 1]` that all processes have."""
        mine = windows.chunk(self.mesh["dp"].size())[self.mesh.get_local_rank("dp")]
        text, labels = (self.context.split(each, 1) for each in (mine[:, :-1], mine[:, 1:]))
        positions = self.context.positions(self.settings.length)
        return cross_entropy(self.model(text, positions), labels.flatten())

    def mean(self, loss: Tensor) -> float:
        """The mean over all processes, which have the same number of tokens."""
        total = loss.detach().clone()
        distributed.all_reduce(total)
        return total.item() / distributed.get_world_size()


# ---------------------------------------------------------------------- text
def load_text() -> tuple[Tensor, int]:
    """The characters, and the number of different ones."""
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def batch(text: Tensor, settings: Settings, step: int) -> Tensor:
    """Random windows, `[batch, length + 1]`: those of a step are the same in all processes."""
    generator = torch.Generator().manual_seed(settings.seed + step)
    first = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=generator)
    return text[first + torch.arange(settings.length + 1)]


# ---------------------------------------------------------------------- a run
def make(characters: int, settings: Settings, gated: bool = True) -> CharLM:
    """The same weights in all processes."""
    torch.manual_seed(settings.seed)
    model = CharLM(characters, settings)
    if gated:
        hk.heads.gate(model, lambda heads: hk.nn.HardConcrete(heads, log_alpha=0.0))
    return model


def train(run: Run, text: Tensor) -> list[float]:
    """The loss of each step, without the penalty."""
    settings = run.settings
    gates = [p for name, p in run.model.named_parameters() if name.endswith("log_alpha")]
    weights = [p for name, p in run.model.named_parameters() if not name.endswith("log_alpha")]
    groups = [{"params": weights}, {"params": gates, "lr": settings.gate_rate, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.rate)
    schedule = hk.heads.GateSchedule(run.model, open_heads=settings.open_heads, steps=settings.steps)
    run.model.train()
    losses = []
    for step in range(settings.steps):
        # Gates share their noise over tp and cp. With this seed also over dp, which is not necessary.
        torch.manual_seed(settings.seed + step)
        loss = run.loss(batch(text, settings, step))
        (loss + schedule.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(run.mean(loss))
    schedule.finish()  # the gates are 0 and 1 from now on
    return losses


def evaluate(run: Run, text: Tensor) -> float:
    """The loss of one batch that the model has not seen."""
    run.model.eval()
    with torch.no_grad():
        return run.mean(run.loss(batch(text, run.settings, run.settings.steps)))


def prune(run: Run, whole: CharLM) -> Run:
    """The model without its closed heads; each layer keeps a number of heads that the mesh can split."""
    gather(run.model, into=whole)
    processes = run.mesh["tp"].size()
    closed = hk.heads.closed(whole)
    for name, heads in closed.items():
        left = run.settings.heads - len(heads)
        closed[name] = heads[: len(heads) - -left % processes]
    hk.heads.prune(whole, closed)
    return Run(whole, run.mesh, run.settings)


def save(run: Run, folder: str) -> None:
    shapes = json.dumps(hk.heads.shapes(run.model))
    state = {"model": run.model.state_dict(), "heads": shapes}
    checkpoint.save(state, checkpoint_id=folder)


def load(folder: str, fresh: CharLM, mesh: DeviceMesh, settings: Settings) -> Run:
    """A saved model over any mesh that can split its heads."""
    saved = {"heads": ""}
    checkpoint.load(saved, checkpoint_id=folder)
    hk.heads.apply_shapes(fresh, json.loads(saved["heads"]))
    run = Run(fresh, mesh, settings)
    checkpoint.load({"model": fresh.state_dict()}, checkpoint_id=folder)
    return run


def run_all(
    shape: tuple[int, int, int],
    settings: Settings,
    folder: str,
    show: Callable[[str], None] = print,
) -> dict[str, list[float]]:
    """Train, prune, save and load: the losses of the steps, and of one batch at each later stage."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    text, characters = load_text()
    run = Run(make(characters, settings), mesh, settings)
    losses = train(run, text)
    show(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {settings.steps} steps")
    trained = evaluate(run, text)
    pruned = prune(run, make(characters, settings))
    left = [layer.num_heads for layer in hk.heads.attention_layers(pruned.model)]
    smaller = evaluate(pruned, text)
    show(f"loss {trained:.3f} with gates, {smaller:.3f} pruned to {left} heads")
    save(pruned, folder)
    world = distributed.get_world_size()
    other = init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=NAMES)
    loaded = load(folder, make(characters, settings, gated=False), other, settings)
    again = evaluate(loaded, text)
    show(f"loss {again:.3f} loaded over {world} x 1 x 1 processes")
    return {"training": losses, "stages": [trained, smaller, again], "heads": left}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=int, nargs=3, metavar=("DP", "TP", "CP"), default=(1, 1, 1))
    parser.add_argument("--method", choices=["all_gather", "ring"], default="all_gather")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--folder", help="of the checkpoint (default: a new one, removed at the end)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    world = distributed.get_world_size()
    if torch.Size(options.mesh).numel() != world:
        parser.error(f"--mesh {options.mesh} does not have the {world} processes of torchrun")
    settings = Settings(steps=options.steps, method=options.method)
    show = print if distributed.get_rank() == 0 else lambda _: None
    with tempfile.TemporaryDirectory() as made:
        folder = [options.folder or made]
        distributed.broadcast_object_list(folder)  # the first process's
        run_all(tuple(options.mesh), settings, folder[0], show)
        distributed.barrier()  # all have read the checkpoint
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
