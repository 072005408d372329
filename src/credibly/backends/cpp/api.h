// Arguments of the exported functions. api.py mirrors every struct field by field, and a test compares the two.
//
// Each field takes eight bytes, so no struct has padding. T is the dtype of the function, float (f32) or double (f64).
// Arrays are described by their axes from the slowest to the fastest: [chain][dim].
#pragma once

#include <cstdint>

// Linkage of the exported functions.
#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C"
#endif

enum Activation { NONE, RELU, TANH, SILU, SIGMOID };
enum Likelihood { GAUSSIAN, HETEROSCEDASTIC, CATEGORICAL, BERNOULLI };

// A stack of linear layers.
struct Network {
  int64_t layers;
  const int64_t* inputs;      // [layer]
  const int64_t* outputs;     // [layer]
  const int64_t* weight;      // [layer], offset of the weight (outputs, inputs) in a parameter vector
  const int64_t* bias;        // [layer], offset of the bias, or -1
  const int64_t* activation;  // [layer], an Activation
  int64_t dim;                // length of a parameter vector
};

// Data in columns, and the likelihood.
template <class T> struct Data {
  int64_t rows;
  int64_t padded;       // rows with padding, a multiple of ROW_MULTIPLE
  const T* x;           // [input][padded row]
  const T* y;           // [target][padded row], class labels as reals
  int64_t kind;         // a Likelihood
  int64_t targets;
  const double* scale;  // [target], the noise scale where it is fixed
  int64_t log_scale;    // offset of the learned log scale in a parameter vector, or -1
  int64_t per_target;   // whether every target has its own learned scale
  double weight;        // 1 / temperature of the likelihood
  const T* row_weight;  // [padded row], the weights of the rows, or null for ones
};

// A normal prior.
template <class T> struct Prior {
  const T* loc;        // [dim]
  const T* precision;  // [dim], divided by the temperature of the prior
};

// The normal prior of output weights that are integrated out, or nulls if none are. Features are the units of the last
// hidden layer and, if the output has a bias, a constant.
struct OutputPrior {
  const double* loc;        // [feature]
  const double* precision;  // [feature], divided by the temperature of the prior
};

template <class T> struct Density {
  Network network;
  Data<T> data;
  Prior<T> prior;
  OutputPrior output;
};

// -- functions on a Density -----------------------------------------------------------------------------------------
// Log likelihoods and gradients of the log density.
template <class T> struct Evaluations {
  int64_t chains;
  int64_t threads;
  const T* theta;          // [chain][dim]
  T* gradient;             // [chain][dim]
  double* log_likelihood;  // [chain]
};

// Parameter vectors whose output weights are standardised, and the same with the weights themselves.
template <class T> struct Decodings {
  int64_t chains;
  int64_t threads;
  const T* standardised;  // [chain][dim]
  T* theta;               // [chain][dim]
};

// Ranks of the factors of a mass are multiples of this, padded with zeros.
constexpr int64_t RANK_MULTIPLE = 16;

// M^-1 = diag(s) (I + sum over factors of U diag(gain) U') diag(s), or diagonal without factors.
template <class T> struct InverseMass {
  const T* diagonal;     // [dim] without factors, or null for ones
  const T* scale;        // [dim], s with factors
  int64_t factors;
  const int64_t* start;  // [factor], the first coordinate
  const int64_t* rows;   // [factor], coordinates
  const int64_t* rank;   // [factor]
  const T* vectors;      // [factor][row][rank], U
  const T* gain;         // [factor][rank]
};

// Trajectories of a symplectic integrator, in place.
template <class T> struct Trajectories {
  int64_t chains;
  int64_t threads;
  T* theta;                // [chain][dim]
  T* momentum;             // [chain][dim]
  T* gradient;             // [chain][dim]
  double* log_likelihood;  // [chain]
  const T* step_size;      // [chain]
  InverseMass<T> inverse_mass;
  const int64_t* steps;    // [chain]
  int64_t drifts;          // per step
  const double* kick;      // [drifts + 1]
  const double* drift;     // [drifts]
};

// Transitions of the No-U-Turn sampler, in place.
template <class T> struct Trees {
  int64_t chains;
  int64_t threads;
  T* theta;                // [chain][dim]
  T* momentum;             // [chain][dim]
  T* gradient;             // [chain][dim]
  double* log_likelihood;  // [chain]
  const T* step_size;      // [chain]
  InverseMass<T> inverse_mass;
  const double* loc;       // [dim], of the prior
  const double* precision; // [dim], of the prior, divided by its temperature
  const double* uniform;   // [chain][uniform_pitch]: direction and choice per doubling, then one number per point
  int64_t uniform_pitch;
  int64_t depth;           // most doublings
  double divergent;        // growth of the energy that ends a trajectory
  double* outcome;         // [chain][8]: acceptance, moved, divergent, energy error of the draw and largest one,
                           // doublings, steps, whether the depth ended the trajectory
};

// Paths of microcanonical Langevin dynamics, in place.
template <class T> struct Paths {
  int64_t chains;
  int64_t threads;
  T* theta;                // [chain][dim]
  T* direction;            // [chain][dim], of unit length
  T* gradient;             // [chain][dim]
  double* log_likelihood;  // [chain]
  double step_size;
  const T* scale;          // [dim], of the coordinates, or null for ones
  const double* loc;       // [dim], of the prior
  const double* precision; // [dim], of the prior, divided by its temperature
  int64_t steps;
  int64_t drifts;          // per step
  const double* kick;      // [drifts + 1]
  const double* drift;     // [drifts]
  const T* noise;          // [chain][step][dim], standard normal, or null for paths without noise
  int64_t noise_pitch;     // from one chain to the next
  double strength;         // of the noise
  double* outcome;         // [chain][2]: sums of the energy errors and of their squares over the steps
};

// Steps of SGHMC, or of SGLD with a momentum decay of zero, on minibatches, in place.
template <class T> struct MinibatchSteps {
  int64_t chains;
  int64_t threads;
  int64_t count;           // steps
  T* theta;                // [chain][dim]
  T* momentum;             // [chain][dim], in units of the preconditioned coordinates
  T* gradient;             // [chain][dim]
  const T* root;           // [dim], square root of the diagonal preconditioner, or null for the identity
  double* log_likelihood;  // [chain], of the last step, scaled to all rows
  const int64_t* rows;     // [step][chain][batch], or null for all rows in every step
  int64_t batch;
  double scale;            // number of rows / batch size
  const T* noise;          // [chain][step][dim], standard normal
  int64_t noise_pitch;     // from one chain to the next
  const double* schedule;  // [step][4]: step size, noise factor (1, or 0 for no noise), momentum decay, unused
};

// Training steps of ensemble members that minimise -weight * log likelihood + the negative log prior, in place.
template <class T> struct TrainingSteps {
  int64_t members;
  int64_t threads;
  int64_t count;            // steps
  const T* active;          // [member], 0 for a member that has stopped
  T* theta;                 // [member][dim]
  T* first_moment;          // [member][dim], the momentum of gradient descent
  T* second_moment;         // [member][dim], null without Adam
  T* loss_parts;            // [member][2]: likelihood and prior part of the last loss
  double* first_bad;        // [member], the first step whose loss was not finite
  const int64_t* rows;      // or null for all rows in every step
  int64_t batch;
  int64_t step_pitch;       // from the rows of one step to the next
  int64_t member_pitch;     // from the rows of one member to the next
  const double* schedule;   // [step][schedule_pitch]: learning rate, the two bias corrections of Adam, step number
  int64_t schedule_pitch;
  int64_t adam;             // 0: gradient descent with momentum
  double beta1;             // decay of the first moment
  double beta2;             // decay of the second moment
  double eps;
  double clip_norm;         // 0 for no clipping
  double weight;            // of the log likelihood of a row in the loss
  double constant;          // of the prior part
  const T* const* uniform;  // [layer] to [step][input][padded row], null for no dropout in a layer or in all
  const T* rates;           // [member][layer], of dropout
  const T* precision;       // [member][dim], with dropout: replaces that of the prior
  int64_t fixed_from;       // with dropout: parameters from this offset on stay fixed
};

// -- prediction -----------------------------------------------------------------------------------------------------
// Outputs of a network for many parameter vectors.
template <class T> struct Outputs {
  Network network;
  int64_t rows;
  int64_t padded;
  const T* x;      // [input][padded row]
  int64_t chains;  // parameter vectors
  int64_t threads;
  const T* theta;  // [chain][dim]
  T* out;          // [chain][row][output]
};

// Outputs of a network for one parameter vector under many dropout masks.
template <class T> struct Passes {
  Network network;
  int64_t rows;
  int64_t padded;
  const T* x;             // [input][padded row]
  int64_t passes;
  int64_t threads;
  const T* theta;         // [dim]
  const T* const* masks;  // [layer] to [pass][input], null for a layer without dropout
  int64_t mask_pitch;     // from one pass to the next
  T* out;                 // [pass][row][output]
};

// Mean and variance over draws.
template <class T> struct Moments {
  const T* values;  // [draw][column]
  int64_t draws;
  int64_t columns;
  int64_t threads;
  double* mean;      // [column]
  double* variance;  // [column]
};

// -- wide networks, in float32 --------------------------------------------------------------------------------------
// Data in rows.
struct Table {
  const float* x;   // [row][input]
  const float* y;   // [row][column], class labels as reals
  int64_t columns;  // of y
};

// A normal prior, by coordinate and by chunk of CHUNK coordinates.
struct ChunkedPrior {
  const float* loc;              // [dim, padded to whole chunks]
  const float* precision;        // [dim, padded to whole chunks]
  const float* chunk_loc;        // [chunk]
  const float* chunk_precision;  // [chunk], nan where loc or precision vary within the chunk
};

struct WideDensity {
  Network network;
  Data<float> data;  // without x and y
  Table table;
  ChunkedPrior prior;
};

// Keys of a stream of normal numbers.
struct Keys {
  uint64_t first;
  uint64_t second;
};

// The same as MinibatchSteps, with noise generated from keys.
struct WideSteps {
  int64_t chains;
  int64_t threads;
  int64_t count;           // steps
  int64_t single_thread;   // whether a chain is too small for several threads
  float* theta;            // [chain][dim]
  float* momentum;         // [chain][dim]
  float* gradient;         // [chain][dim]
  const float* root;       // [dim] and up to a whole chunk, or null for the identity
  double* log_likelihood;  // [chain], of the last step, scaled to all rows
  const int64_t* rows;     // [step][chain][batch], or null for all rows in every step
  int64_t batch;
  double scale;            // number of rows / batch size
  const Keys* keys;        // [step][chain]
  const double* schedule;  // [step][4]: step size, noise factor (1, or 0 for no noise), momentum decay, unused
};

// Normal numbers of one stream.
struct Normals {
  Keys keys;
  int64_t count;    // a multiple of CHUNK
  int64_t threads;
  float* out;       // [count]
};

// A draw w = m + e / sqrt(n (h + delta)) of independent Gaussians, e from the keys.
struct GaussianDraw {
  Keys keys;
  int64_t count;
  int64_t threads;
  const float* mean;       // [count]
  const float* curvature;  // [count]
  const float* deltas;     // [count], or null for `delta` everywhere
  double delta;
  double n;
  float* out;              // [count]
};

// One update of IVON for one parameter, given the gradient at a draw.
struct GaussianUpdate {
  int64_t count;
  int64_t threads;
  float* mean;             // [count], as all others
  float* curvature;
  float* momentum;
  const float* gradient;
  const float* drawn;
  double n;
  double delta;            // curvature of the prior
  double loc;              // its mean
  double beta1;
  double rate;             // 1 - b2
  double lr;
  double correction;       // of the mean gradient, which starts at zero
};
