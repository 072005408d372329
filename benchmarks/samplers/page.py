def summary(record): return ""
def write_page(*a, **k): pass
