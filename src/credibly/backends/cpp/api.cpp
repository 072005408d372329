// Sizes of the structs in api.h, for the test that compares them with api.py.

#include "api.h"

#include <cstring>

// Returns the size in bytes of the struct with the given name, or -1 if there is none.
EXPORTED int64_t struct_size(const char* name) {
#define SIZE(NAME, ...) \
  if (!std::strcmp(name, #NAME)) return int64_t(sizeof(NAME __VA_ARGS__))
  SIZE(Network);
  SIZE(Data, <float>);
  SIZE(Prior, <float>);
  SIZE(OutputPrior);
  SIZE(Density, <float>);
  SIZE(Evaluations, <float>);
  SIZE(Decodings, <float>);
  SIZE(InverseMass, <float>);
  SIZE(Trajectories, <float>);
  SIZE(Trees, <float>);
  SIZE(Paths, <float>);
  SIZE(MinibatchSteps, <float>);
  SIZE(TrainingSteps, <float>);
  SIZE(Outputs, <float>);
  SIZE(Passes, <float>);
  SIZE(Moments, <float>);
  SIZE(Table);
  SIZE(ChunkedPrior);
  SIZE(WideDensity);
  SIZE(Keys);
  SIZE(WideSteps);
  SIZE(Normals);
  SIZE(GaussianDraw);
  SIZE(GaussianUpdate);
#undef SIZE
  return -1;
}
