#include "mlp.h"

EXPORT_MLP(float, f32)
