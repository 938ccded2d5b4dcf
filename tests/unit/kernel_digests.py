"""Runs the kernel of digests in Triton's interpreter, or compiles it, and prints JSON: ``kernel_digests.py interpret``.

It is a process of its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

COMPILED_FOR = ("cuda", 90, 32)


def interpreted() -> dict[str, Any]:
    """Returns the sum of the digests of each case: of each alone, and of all in one launch; and those of all parts."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from rl_safe_workers.rollout.digest_kernel import digests_of, table_of
    from tests.digest_cases import cases, cut_tensors

    found, at_once = {}, [(name, *pair) for name, case in cases().items() for pair in zip(*case[:2], strict=True)]
    together = digests_of([tensor for _, tensor, _ in at_once], [span for _, _, span in at_once])
    for name, case in cases().items():
        found[name] = int(digests_of(case.tensors, case.spans).sum())
        chosen = [number for number, (of, _, _) in enumerate(at_once) if of == name]
        found[f"{name}, with all others"] = int(together[chosen].sum())
    cut = cut_tensors()
    sizes = [of.sizes for of in cut.values()]
    found["parts"] = digests_of([of.tensor for of in cut.values()], None, sizes).tolist()
    moving = [torch.arange(size, dtype=torch.int32) for size in (5, 70_000)]
    sizes = [(20,), (4, 279_996)]
    table = table_of(moving, None, sizes)
    assert table is not None
    found["table"] = []
    for tensor in (moving[0], moving[1]):
        tensor.add_(1)
        found["table"].append([table.digests().tolist(), digests_of(moving, None, sizes).tolist()])
    found["no table"] = table_of([torch.arange(8)[::2]]) is None
    return found


def compiled() -> dict[str, int]:
    """Returns the number of loads of 16 bytes in the code of each variant of the kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_safe_workers.rollout import digest_kernel

    found = {}
    for in_runs in (False, True):
        for is_aligned in (False, True):
            constants = digest_kernel.constants(in_runs=in_runs, is_aligned=is_aligned)
            arguments = dict.fromkeys(digest_kernel.digest_chunks.arg_names, "*i64") | {
                "tensors": "i32",
                "chunks": "i32",
            }
            source = ASTSource(
                fn=digest_kernel.digest_chunks,
                signature=arguments | dict.fromkeys(constants, "constexpr"),
                constexprs={(digest_kernel.digest_chunks.arg_names.index(name),): of for name, of in constants.items()},
            )
            code = triton.compile(source, target=GPUTarget(*COMPILED_FOR)).asm["ptx"]
            found[f"in_runs={in_runs}, is_aligned={is_aligned}"] = code.count("ld.global.v4")
    return found


if __name__ == "__main__":
    json.dump({"interpret": interpreted, "compile": compiled}[sys.argv[1]](), sys.stdout)
