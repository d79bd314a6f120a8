"""Loops in the machine code of NVIDIA's GPUs, as nvdisasm prints it.

A kernel's instructions make a graph of blocks (networkx, which torch requires); its natural loops are found by
dominators, so that code which the compiler moved behind the kernel is counted where it runs. Of the ways round a loop
the *hot path* is reported: the one with the most matrix instructions, then the most asynchronous copies, then the
fewest instructions. In attention kernels that is a tile that all rows see whole and copies of aligned rows: masks,
dropout, unaligned copies and slow paths of divisions lie beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import networkx

_FUNCTION: Final = re.compile(r"^\.text\.(\S+):")
_LABEL: Final = re.compile(r"^\s*(\.L_x?_?\w+):")
_INSTRUCTION: Final = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*)"
)
_TARGET: Final = re.compile(r"`\((\.L\w+)\)")
#: Instructions of tensor cores.
MATRIX: Final = re.compile(r"HMMA|HGMMA|UTC\w*MMA|IMMA|QMMA")
#: Of HMMA.16816 and HGMMA.64x128x16: rows, columns, features.
_HMMA: Final = re.compile(r"HMMA\.(16)(8)(16|8|4)\b")
_HGMMA: Final = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
_WARPGROUP: Final = 4  # warps that share one HGMMA
_COPY: Final = re.compile(r"LDGSTS|UTMALDG|UBLKCP")
#: After these no other instruction of the kernel follows.
_ENDS: Final = {"EXIT", "RET", "BRX", "JMX"}


@dataclass(frozen=True)
class Instruction:
    """One line: `HMMA.16816.F32.BF16`, its operands, whether a predicate guards it, the label that it may go to."""

    opcode: str
    operands: str
    predicated: bool
    target: str | None

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order, and where its labels stand among them."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


@dataclass(frozen=True)
class Loop:
    """A loop without those inside it that have matrix instructions: they are loops of their own.

    Other loops inside it count as one round each: what the code does not say is how often they run.
    """

    instructions: int  # in all ways round it
    hot: tuple[Instruction, ...]  # of the hot path, in order

    @property
    def spills(self) -> int:
        """Instructions of the hot path that store or load a register in memory of the thread."""
        return sum(each.name in ("STL", "LDL") for each in self.hot)

    @property
    def overlap(self) -> tuple[int, int]:
        """Exponentials (MUFU) that run while a product of a warpgroup is under way, and all of the hot path.

        They stand behind a wait that leaves a product (`WARPGROUP.DEPBAR.LE gsb0, 0x1`) and before the next wait.
        """
        under_way, counts = False, [0, 0]
        for each in self.hot:
            if each.opcode.startswith("WARPGROUP.DEPBAR"):
                under_way = not each.operands.endswith(" 0x0")
            counts[0] += under_way and each.name == "MUFU"
            counts[1] += each.name == "MUFU"
        return counts[0], counts[1]

    @property
    def products(self) -> int | None:
        """What one warp multiplies and adds on the hot path; None where an instruction does not say."""
        total = 0
        for each in self.hot:
            if MATRIX.match(each.name):
                shape = _HMMA.match(each.opcode) or _HGMMA.match(each.opcode)
                if shape is None:  # of tcgen05 it is a number in a register
                    return None
                m, n, k = (int(number) for number in shape.groups())
                total += m * n * k // (_WARPGROUP if each.name == "HGMMA" else 1)
        return total


def parse(text: str) -> dict[str, Code]:
    """The kernels in what `nvdisasm -c` prints, by their name in the object."""
    result: dict[str, Code] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    name = None
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            if name is not None:
                result[name] = Code(tuple(instructions), labels)
            name, instructions, labels = match[1], [], {}
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            target = _TARGET.search(match["operands"])
            instructions.append(
                Instruction(
                    match["opcode"], match["operands"].strip(), match["predicate"] is not None,
                    target[1] if target else None,
                )
            )  # fmt: skip
    if name is not None:
        result[name] = Code(tuple(instructions), labels)
    return result


# ---------------------------------------------------------------------- the graph of blocks
def _graph(code: Code) -> Any:
    """A `networkx.DiGraph` of blocks by their first instruction, each with its `lines`; 0 is the kernel's entry."""
    lines = code.instructions
    leaders = {0, *(at for at in code.labels.values() if at < len(lines))}
    leaders |= {i + 1 for i, each in enumerate(lines[:-1]) if _leaves(each)}
    starts = sorted(leaders)
    synced = _reconvergence(code)
    graph: Any = networkx.DiGraph()
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        graph.add_node(start, lines=lines[start:end])
        last = lines[end - 1]
        target = synced.get(end - 1) if last.name == "BSYNC" else last.target
        jump = code.labels.get(target or "", len(lines))
        jumps = last.name in ("BRA", "BSYNC") and jump < len(lines)
        if jumps:
            graph.add_edge(start, jump)
        goes_on = last.predicated or (last.name == "BRA" and not last.operands.startswith("`"))
        plain = last.name not in {*_ENDS, "BRA"} and not (last.name == "BSYNC" and jumps)
        if (plain or goes_on) and end < len(lines):
            graph.add_edge(start, end)
    _follow_tables(graph)
    # What nothing leads to is padding behind the kernel.
    return graph.subgraph({0, *networkx.descendants(graph, 0)})


def _follow_tables(graph: Any) -> None:
    """Add the ways from tables of jumps (BRX) to what nothing else leads to: partitions of specialized warps."""
    tables = [node for node, own in graph.nodes(data="lines") if own[-1].name == "BRX"]
    reached = {0}.union(networkx.descendants(graph, 0), tables)
    parts = networkx.condensation(graph.subgraph(set(graph) - reached))
    for part in [each for each in parts if not parts.pred[each]]:
        entry = min(parts.nodes[part]["members"])
        graph.add_edges_from((table, entry) for table in tables)


def _leaves(each: Instruction) -> bool:
    return each.name in {*_ENDS, "BRA", "BSYNC"}


def _reconvergence(code: Code) -> dict[int, str]:
    """Where each BSYNC goes on: at the label of the BSSY with its barrier that stands last before it."""
    labels: dict[str, str] = {}
    result = {}
    for i, each in enumerate(code.instructions):
        barrier = re.match(r"(?:\.\w+ )*(B\d+)", each.operands)
        if barrier and each.name == "BSSY" and each.target:
            labels[barrier[1]] = each.target
        elif barrier and each.name == "BSYNC" and barrier[1] in labels:
            result[i] = labels[barrier[1]]
    return result


def _bodies(graph: Any) -> dict[int, set[int]]:
    """The blocks of every natural loop, by its first block: what reaches a jump back to it without passing it."""
    dominator = networkx.immediate_dominators(graph, 0)
    result: dict[int, set[int]] = {}
    for block, head in graph.edges:
        above = block
        while above not in (head, 0):
            above = dominator[above]
        if above == head:
            inside = graph.subgraph(set(graph) - {head})
            body = networkx.ancestors(inside, block) | {block} if block != head else set()
            result.setdefault(head, {head}).update(body)
    # Specialized warps wait for work in a loop around all that they do.
    tables = {block for block, own in graph.nodes(data="lines") if own[-1].name == "BRX"}
    return {head: body for head, body in result.items() if not body & tables}


# ---------------------------------------------------------------------- loops
@dataclass(frozen=True)
class _Path:
    """A way round a loop: all that runs, and what of it is the loop's own."""

    lines: tuple[Instruction, ...] = ()
    own: tuple[Instruction, ...] = ()

    @property
    def matrix(self) -> int:
        return sum(MATRIX.match(each.name) is not None for each in self.lines)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The hot path has the highest."""
        copies = sum(_COPY.match(each.name) is not None for each in self.lines)
        return self.matrix, copies, -len(self.lines)

    def before(self, rest: _Path) -> _Path:
        return _Path(self.lines + rest.lines, self.own + rest.own)

    def inside(self) -> _Path:
        """The same as one step of the loop around it."""
        return _Path(self.lines, () if self.matrix else self.lines)


def loops(code: Code) -> list[Loop]:
    """Those with matrix instructions of their own on the hot path, in the order of the code."""
    graph = _graph(code)
    bodies = _bodies(graph)
    paths: dict[int, _Path] = {}
    result = {}
    for head in sorted(bodies, key=lambda head: len(bodies[head])):  # inner ones first
        inside = [each for each in bodies if each != head and bodies[each] < bodies[head]]
        direct = [each for each in inside if not any(bodies[each] < bodies[o] for o in inside)]
        path = paths[head] = _hot_path(graph, head, bodies, direct, paths)
        if any(MATRIX.match(each.name) for each in path.own):
            size = sum(len(graph.nodes[block]["lines"]) for block in bodies[head])
            result[head] = Loop(size, path.own)
    return [result[head] for head in sorted(result)]


def _hot_path(graph: Any, head: int, bodies: dict[int, set[int]], direct: list[int], paths: dict[int, _Path]) -> _Path:
    """The hot path round the loop at `head`; the loops right inside it, `direct`, are one step each."""
    step_of = {block: block for block in bodies[head]}
    step_of |= {block: each for each in direct for block in bodies[each]}
    steps: Any = networkx.DiGraph()  # of one round, so without the jumps back to `head`
    steps.add_nodes_from(step_of.values())
    last = set()  # steps that end a round
    for block, follows in graph.subgraph(bodies[head]).edges:
        if follows == head:
            last.add(step_of[block])
        elif step_of[block] != step_of[follows]:
            steps.add_edge(step_of[block], step_of[follows])
    best: dict[int, _Path] = {}  # from a step to the end of the round
    for step in reversed(list(networkx.topological_sort(steps))):
        ways = [best[each] for each in steps[step] if each in best]
        if step in last:
            ways.append(_Path())
        if ways:
            lines = graph.nodes[step]["lines"]
            own = paths[step].inside() if step in direct else _Path(lines, lines)
            best[step] = own.before(max(ways, key=lambda path: path.rank))
    return best[head]
