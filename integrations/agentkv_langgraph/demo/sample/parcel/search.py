"""Finding an article although its name is misspelt."""


def distance(a: str, b: str) -> int:
    """Edits (insert, delete, replace) from `a` to `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(diagonal + (x != y), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def closest(word: str, names: list[str], seen: list[str] = []) -> str:
    """The name with the fewest edits; the first of equals."""
    seen.append(word)
    return min(names, key=lambda name: distance(word.lower(), name.lower()))


def near_duplicates(names: list[str], within: int = 2) -> list[tuple[str, str]]:
    """Pairs of names that differ in a few letters only."""
    pairs = []
    for i in range(len(names)):
        for k in range(i + 1, len(names)):
            if distance(names[i], names[k]) <= within:
                pairs.append((names[i], names[k]))
    return pairs
