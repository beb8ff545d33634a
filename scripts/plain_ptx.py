"""Normalises PTX for comparisons. Imports nothing that chooses a device."""

from __future__ import annotations

import re


def plain(ptx: str) -> str:
    """PTX without comments, debug information and the names of kernels."""
    ptx = re.sub(r"//[^\n]*", "", ptx.split(".section\t.debug")[0])
    ptx = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", ptx, flags=re.MULTILINE)
    for name in set(re.findall(r"\.entry (\w+)\(", ptx)):
        ptx = ptx.replace(name, "kernel")
    ptx = re.sub(r"\$L__tmp\d+:|\$L__func_(begin|end)\d+:", "", ptx)
    return "\n".join(line.rstrip() for line in ptx.splitlines() if line.strip()) + "\n"
