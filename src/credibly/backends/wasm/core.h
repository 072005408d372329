// Functions that backends/cpp/mlp_f32.cpp and moments.cpp export. They return 0, or 1 if memory does not suffice.
#pragma once

#include "../cpp/api.h"

extern "C" {
int64_t evaluations_f32(const Density<float>* density, const Evaluations<float>* args);
int64_t decodings_f32(const Density<float>* density, const Decodings<float>* args);
int64_t trajectories_f32(const Density<float>* density, const Trajectories<float>* args);
int64_t training_steps_f32(const Density<float>* density, const TrainingSteps<float>* args);
int64_t outputs_f32(const Outputs<float>* args);
int64_t moments_f32(const Moments<float>* args);
}
