def summary(r): return ''
def write_page(*a): pass
