"""Tables: files of most formats in, predictions with uncertainty out.

from credibly.tables import Config, TableRun, fit_table, prepare
run = fit_table(prepare(Config("house.csv", "price")), "run/")     # credibly fit house.csv --target price --out run/
TableRun.load("run/").model.predict_file("new.csv", "predictions.csv")
"""

from credibly.tables.config import Config
from credibly.tables.run import TableRun, fit_table, prepare, resume_table

__all__ = ["Config", "TableRun", "fit_table", "prepare", "resume_table"]
