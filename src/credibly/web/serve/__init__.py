"""`credibly serve`: a prediction server for run folders.

    a request --app--> body --rows--> inputs --batching--> columns --answers--> JSON or CSV

`app` has the routes and `guard` everything that applies to all of them (token, limits, errors, logs). `runs` holds
the loaded folders, which `watching` replaces when they change. Numbers come from `TableModel.predict_columns`, the code
of `credibly predict`.
"""
