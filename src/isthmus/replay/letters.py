"""Letters of five by seven dots, for labels in pictures. Lower case is drawn as capitals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 5, 7

# A digit in base 32 per row of dots, from the top; its bits are the dots, the leftmost first.
_ROWS = {
    "A": "ehhvhhh", "B": "uhhuhhu", "C": "ehggghe", "D": "uhhhhhu", "E": "vgguggv", "F": "vgguggg",
    "G": "ehgnhhe", "H": "hhhvhhh", "I": "e44444e", "J": "72222ic", "K": "hikokih", "L": "ggggggv",
    "M": "hrllhhh", "N": "hpljhhh", "O": "ehhhhhe", "P": "uhhuggg", "Q": "ehhhlid", "R": "uhhukih",
    "S": "fgge11u", "T": "v444444", "U": "hhhhhhe", "V": "hhhhha4", "W": "hhhllrh", "X": "hha4ahh",
    "Y": "hha4444", "Z": "v1248gv", "0": "ehjlphe", "1": "4c4444e", "2": "eh168gv", "3": "u11e11u",
    "4": "26aiv22", "5": "vgu11he", "6": "68guhhe", "7": "v124888", "8": "ehhehhe", "9": "ehhf12c",
    ".": "00000cc", ",": "0000c48", ":": "0cc0cc0", "-": "000v000", "_": "000000v", "/": "11248gg",
    "(": "2488842", ")": "8422248", "%": "op248j3", "+": "044v440", "=": "00v0v00", "#": "aavavaa",
}  # fmt: skip


def draw(text: str, scale: int = 1) -> NDArray[np.bool_]:
    """`[7 scale, (6 n - 1) scale]`, True where there is a dot. What has no shape is blank."""
    cells = np.zeros((HEIGHT, (WIDTH + 1) * len(text)), np.bool_)
    for i, letter in enumerate(text.upper()):
        for row, digit in enumerate(_ROWS.get(letter, "")):
            dots = [(int(digit, 32) >> (WIDTH - 1 - column)) & 1 for column in range(WIDTH)]
            cells[row, i * (WIDTH + 1) : i * (WIDTH + 1) + WIDTH] = dots
    return cells[:, : max(0, cells.shape[1] - 1)].repeat(scale, axis=0).repeat(scale, axis=1)
