"""Write docs/modules.md, the table of networks by methods, from the registry that the tests run.

`python tools/module_table.py` writes the page. `tests/networks/test_module_table.py` checks every cell, and that the
page is in step with the registry.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Which networks work with which method

Any `nn.Module` can be passed to `Problem`. This table has {count} small networks and forward-pass idioms. Tests fit
each of them with every method, so each cell shows tested behaviour. A number marks a combination that is rejected,
with the message listed below the table. If all methods reject a network, `Problem` raises the error before any work.

Wrappers (`DataParallel`, `DistributedDataParallel`, `torch.compile`) are unwrapped to the module inside. The network is
copied; the copy has no sparse gradients or compiled calls, and the checkpointing switches of timm and transformers are
off. A trial decides whether several parameter vectors are evaluated in one batch or one after another: it runs what the
fit will run, with two vectors, shared and separate rows, and gradients. `problem.forward.reason` reports the outcome.

An embedding with `padding_idx` returns zeros for padding whatever the draw, as in plain training. Nested tensors of
`nn.TransformerEncoder` are off: with them, outputs at padded positions depend on whether gradients are taken.

Dropout layers are off in the density: every method except MC-Dropout fits the network in evaluation mode. The repr of a
problem lists them, and so does `record.history["dropout_off"]`.

"""
TAIL = """
## How to fix a rejected network

| the network | fix |
|---|---|
| BatchNorm | `cr.replace_batchnorm(net, "frozen")` for a trained network, `"group"` or `"frn"` to train one |
| edits a buffer in evaluation mode | update it only `if self.training`, or pass what it holds as an input |
| calls `torch.utils.checkpoint` in forward | call the layers directly; `micro_batch=` bounds the memory |
| edits a tensor in place that its gradient needs | `h = h + ...` instead of `h += ...` |
| ends in a softmax, for `Categorical` | remove it, or `LogSoftmax`: the likelihood takes logits |
| float32 and float64 mixed | `net.float()` or `dtype=`; 16-bit and 32-bit layers may be mixed |
| returns a dict, a dataclass or None | `Heads` for a dict of outputs; else a wrapper whose forward returns one tensor |
| ScriptModule, torch.export | pass the Python module that was scripted, traced or exported |
| complex parameters | real and imaginary parts as two real parameters, joined in forward |
| quantised layers after random ones | `random=` selects layers after them; or the network before quantisation |
| mixes rows | `batch_first=True`; `dim=-1` instead of 0; statistics of the data as constants |
| loses the axis of a single row | `.squeeze(-1)` instead of `.squeeze()` |
| classes on axis 1 | `Categorical(axis=1)` |
| rows of different lengths | pad them and pass lengths or a mask as a second input: `data=((padded, lengths), y)` |
"""


def table() -> str:
    """Return the page."""
    sys.path.insert(0, str(ROOT))
    from tests.networks import library_cases, plain_cases  # noqa: F401  (they fill the registry)
    from tests.networks.module_cases import CASES, QUICK, WORKS

    words: list[str] = []
    lines = [f"| network | {' | '.join(QUICK)} |", f"|---|{'---|' * len(QUICK)}"]
    for case in CASES.values():
        cells = []
        for method in QUICK:
            found = case.expected(method)
            if found == WORKS:
                cells.append("✓")
                continue
            words += [found] if found not in words else []
            cells.append(f"{words.index(found) + 1}")
        note = f" *{case.note}*" if case.note else ""
        lines.append(f"| {case.name}{note} | {' | '.join(cells)} |")
    meanings = [f'| {number} | "{word}" |' for number, word in enumerate(words, 1)]
    refusals = ["", "| number | the error contains |", "|---|---|", *meanings]
    return HEAD.format(count=len(CASES)) + "\n".join(lines + refusals) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(table())
