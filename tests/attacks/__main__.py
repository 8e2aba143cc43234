"""`python -m tests.attacks`: see `tests.attacks`."""

from tests.attacks.table import HEADINGS, Size, attacks

if __name__ == "__main__":
    print(HEADINGS)
    for attack in attacks(Size()):
        print(attack, flush=True)
