"""The polynomials by which Artemis orthogonalises: each the odd quintic nearest to 1 where the last has left off.

    python bench/polynomials.py
    python bench/polynomials.py --least 0.002 --rounds 5

Singular values of a matrix of norm 1 lie in (0, 1]. The quintic nearest to 1 on [least, 1] leaves them within an error
of 1, and the next is the one nearest to 1 there: no other polynomials of these degrees bring all of them nearer
(Amsel et al., 2025, The Polar Express). A cushion at the upper end is for what bfloat16 adds to the largest.

Prints the coefficients as `core.orthogonal` has them, and what they make of singular values, beside Muon's.
"""

import argparse
import itertools

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]
MUON: Polynomial = (3.4445, -4.7750, 2.0315)
DIGITS = 4
CUSHION = 1.02
EDGES = 3e-4, 1e-3, 2e-3, 3e-3, 1e-2, 1e-1, 1.0


def nearest_to_one(low: float, high: float) -> tuple[Polynomial, float]:
    """The odd quintic nearest to 1 on [low, high], and its largest error: by Remez, whose four points alternate."""
    inner = low + 0.3 * (high - low), low + 0.8 * (high - low)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    while True:
        x = torch.tensor([low, *inner, high], dtype=torch.float64)
        a, b, c, error = torch.linalg.solve(torch.stack([x, x**3, x**5, signs], 1), torch.ones_like(x)).tolist()
        # The inner points are where a + 3 b x^2 + 5 c x^4 is zero.
        root = (9 * b * b - 20 * a * c) ** 0.5
        found = sorted(((-3 * b + sign * root) / (10 * c)) ** 0.5 for sign in (-1, 1))
        if max(abs(new - old) for new, old in zip(found, inner, strict=True)) < 1e-12:
            return (a, b, c), abs(error)
        inner = found[0], found[1]


def composed(least: float, rounds: int) -> list[Polynomial]:
    """So many polynomials, one after the other, for values from `least` to 1."""
    made: list[Polynomial] = []
    low, high = least, 1.0
    for _ in range(rounds):
        polynomial, error = nearest_to_one(low, high * CUSHION)
        made.append((round(polynomial[0], DIGITS), round(polynomial[1], DIGITS), round(polynomial[2], DIGITS)))
        low, high = 1 - error, 1 + error
    return made


def values(polynomials: list[Polynomial], x: Tensor) -> Tensor:
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=3e-3, help="singular value from which on all are brought near 1")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    ours = composed(args.least, args.rounds)
    for polynomial in ours:
        print(polynomial)
    print(f"{'singular values':>20} {'these':>14} {'Muon, five':>14}")
    for low, high in itertools.pairwise(EDGES):
        x = torch.logspace(torch.tensor(low).log10(), torch.tensor(high).log10(), 10001, dtype=torch.float64)
        ranges = [values(each, x) for each in (ours, [MUON] * 5)]
        print(f"{f'{low:g} to {high:g}':>20}", *(f"{f'{y.min():.3f} to {y.max():.3f}':>14}" for y in ranges))


if __name__ == "__main__":
    main()
