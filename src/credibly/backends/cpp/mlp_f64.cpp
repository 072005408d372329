#include "mlp.h"

EXPORT_MLP(double, f64)
