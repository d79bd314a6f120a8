"""Loops in the machine code of NVIDIA's GPUs, as nvdisasm prints it.

A kernel's instructions make a graph of blocks; its natural loops are found by dominators, so that code which the
compiler moved behind the kernel is counted where it runs. Of the ways round a loop the *hot path* is reported: the one
with the most matrix instructions, then the most asynchronous copies, then the fewest instructions. In attention kernels
that is a tile that all rows see whole and copies of aligned rows: masks, dropout, unaligned copies and slow paths of
divisions lie beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_FUNCTION: Final = re.compile(r"^\.text\.(\S+):")
_LABEL: Final = re.compile(r"^\s*(\.L_x?_?\w+):")
_INSTRUCTION: Final = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*)"
)
_TARGET: Final = re.compile(r"`\((\.L\w+)\)")
#: Instructions of tensor cores.
MATRIX: Final = re.compile(r"HMMA|HGMMA|UTC\w*MMA|IMMA|QMMA")
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
    inner: int  # loops on the hot path: with matrix instructions, or counted as one round

    @property
    def spills(self) -> int:
        """Instructions of the hot path that store or load a register in memory of the thread."""
        return sum(each.name in ("STL", "LDL") for each in self.hot)


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
@dataclass(frozen=True)
class _Graph:
    """Blocks of instructions [start, end) and the blocks that may follow each; block 0 is the kernel's entry."""

    ranges: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, ...], ...]


def _graph(code: Code) -> _Graph:
    lines = code.instructions
    leaders = {0, *(at for at in code.labels.values() if at < len(lines))}
    leaders |= {i + 1 for i, each in enumerate(lines[:-1]) if _leaves(each)}
    starts = sorted(leaders)
    block_at = {start: i for i, start in enumerate(starts)}
    ranges = tuple(zip(starts, [*starts[1:], len(lines)], strict=True))
    synced = _reconvergence(code)
    after: list[tuple[int, ...]] = []
    for start, end in ranges:
        if start == end:
            after.append(())
            continue
        last = lines[end - 1]
        follows = []
        if last.name in ("BRA", "BSYNC"):
            target = last.target if last.name == "BRA" else synced.get(end - 1)
            if target is not None and code.labels.get(target, len(lines)) < len(lines):
                follows.append(block_at[code.labels[target]])
        goes_on = last.predicated or (last.name == "BRA" and not last.operands.startswith("`"))
        plain = last.name not in {*_ENDS, "BRA"} and not (last.name == "BSYNC" and follows)
        if (plain or goes_on) and end < len(lines):
            follows.append(block_at[end])
        after.append(tuple(dict.fromkeys(follows)))
    return _Graph(ranges, tuple(after))


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


def _dominators(graph: _Graph) -> list[set[int]]:
    """Of each block those that every way to it goes through; of blocks that nothing leads to, none."""
    order = _reverse_postorder(graph)
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for follows in graph.after[block]:
            before[follows].append(block)
    all_blocks = set(order)
    result = [all_blocks if block in before else set() for block in range(len(graph.ranges))]
    result[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = set.intersection(*(result[p] for p in before[block])) | {block}
            if new != result[block]:
                result[block], changed = new, True
    return result


def _reverse_postorder(graph: _Graph, root: int = 0) -> list[int]:
    seen, order = {root}, []
    stack: list[tuple[int, Iterator[int]]] = [(root, iter(graph.after[root]))]
    while stack:
        block, follows = stack[-1]
        for each in follows:
            if each not in seen:
                seen.add(each)
                stack.append((each, iter(graph.after[each])))
                break
        else:
            order.append(block)
            stack.pop()
    return order[::-1]


def _bodies(graph: _Graph) -> dict[int, set[int]]:
    """The blocks of every natural loop, by its first block."""
    dominators = _dominators(graph)
    before: dict[int, set[int]] = {}
    for block, follows in enumerate(graph.after):
        for each in follows:
            before.setdefault(each, set()).add(block)
    result: dict[int, set[int]] = {}
    for block, follows in enumerate(graph.after):
        for head in follows:
            if head not in dominators[block]:
                continue
            body = result.setdefault(head, {head})
            left = [block]
            while left:
                each = left.pop()
                if each not in body and dominators[each]:
                    body.add(each)
                    left += before.get(each, ())
    return result


# ---------------------------------------------------------------------- loops
@dataclass(frozen=True)
class _Path:
    """A way round a loop: all that runs, and what of it is the loop's own."""

    lines: tuple[Instruction, ...] = ()
    own: tuple[Instruction, ...] = ()
    inner: int = 0

    @property
    def matrix(self) -> int:
        return sum(MATRIX.match(each.name) is not None for each in self.lines)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The hot path has the highest."""
        copies = sum(_COPY.match(each.name) is not None for each in self.lines)
        return self.matrix, copies, -len(self.lines)

    def before(self, rest: _Path) -> _Path:
        return _Path(self.lines + rest.lines, self.own + rest.own, self.inner + rest.inner)

    def inside(self) -> _Path:
        """The same as one step of the loop around it."""
        return _Path(self.lines, () if self.matrix else self.lines, 1)


def loops(code: Code) -> list[Loop]:
    """Those with matrix instructions of their own on the hot path, in the order of the code."""
    graph = _graph(code)
    bodies = _bodies(graph)
    paths: dict[int, _Path] = {}
    result = {}
    for head in sorted(bodies, key=lambda head: len(bodies[head])):  # inner ones first
        inside = [each for each in bodies if each != head and bodies[each] < bodies[head]]
        direct = [each for each in inside if not any(bodies[each] < bodies[o] for o in inside)]
        path = paths[head] = _hot_path(code, graph, head, bodies, direct, paths)
        if any(MATRIX.match(each.name) for each in path.own):
            size = sum(end - start for start, end in (graph.ranges[b] for b in bodies[head]))
            result[head] = Loop(size, path.own, path.inner)
    return [result[head] for head in sorted(result)]


def _hot_path(
    code: Code, graph: _Graph, head: int, bodies: dict[int, set[int]], direct: list[int],
    paths: dict[int, _Path],
) -> _Path:  # fmt: skip
    """The hot path round the loop at `head`; the loops right inside it, `direct`, are one step each."""
    body = bodies[head]
    step_of = {block: each for each in direct for block in bodies[each]}

    def follows(step: int) -> set[int]:
        blocks = bodies[step] if step in direct else {step}
        reached = {each for block in blocks for each in graph.after[block]} & body
        return {step_of.get(each, each) for each in reached - blocks if each != head}

    def ends(step: int) -> bool:
        blocks = bodies[step] if step in direct else {step}
        return any(head in graph.after[block] for block in blocks)

    steps = {block: tuple(follows(block)) for block in {step_of.get(b, b) for b in body}}
    numbered = {block: i for i, block in enumerate(steps)}
    small = _Graph(
        tuple((0, 0) for _ in steps),
        tuple(tuple(numbered[each] for each in after) for after in steps.values()),
    )
    blocks = list(steps)
    best: dict[int, _Path] = {}  # from a step to the end of the round
    for i in reversed(_reverse_postorder(small, numbered[head])):
        block = blocks[i]
        ways = [best[each] for each in steps[block] if each in best]
        if ends(block):
            ways.append(_Path())
        if ways:
            lines = code.instructions[slice(*graph.ranges[block])]
            own = paths[block].inside() if block in direct else _Path(lines, lines)
            best[block] = own.before(max(ways, key=lambda path: path.rank))
    return best[head]
