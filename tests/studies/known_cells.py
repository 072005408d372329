"""Values of repeats, made up to be far apart or close to each other."""


def cells(measure, **values):
    """Return three repeats close to each value, so that differences above 0.01 are significant; tuples stay as is."""
    shaken = {k: v if isinstance(v, tuple) else (v - 0.001, v, v + 0.0012) for k, v in values.items()}
    return {k.removeprefix("_").replace("p", "."): {measure: list(v)} for k, v in shaken.items()}


def joined(*parts):
    found = {}
    for part in parts:
        for setting, row in part.items():
            found.setdefault(setting, {}).update(row)
    return found


NOISY = (-0.5, 0.0, 0.6)
