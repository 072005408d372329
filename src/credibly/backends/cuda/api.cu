// The parameter of the kernel, and what all parts of it use. spec.py joins api.cu, layers.cu, likelihood.cu and mlp.cu.
//
// It prepends these constants:
//   REAL: dtype; LAYERS, TARGETS, DRIFTS: counts; KIND: a likelihood; IN, OUT, ACT: [layer] sizes and activation.
//   WEIGHT, BIAS: [layer] offsets in a parameter vector whose weight rows are padded to 16 bytes. Its elements are
//     called slots. SLOTS: its length; LOG_SCALE: slot of the learned log scale, or -1; PER_TARGET: whether per target.
//   BLOCKS: per chain; WARPS: of a block that process rows; BLOCK_WARPS: with helpers that only add up.
//   INPUTS, VALUES, DERIVATIVES: [layer] offsets in the memory of a warp; WARP_MEMORY: its size; INPUT_SIZE: of inputs.

enum { NONE, RELU, TANH, SILU, SIGMOID };
enum { GAUSSIAN, HETEROSCEDASTIC, CATEGORICAL, BERNOULLI };

constexpr int PACK = 16 / int(sizeof(REAL));  // numbers per load
constexpr int PITCH = 32 + PACK;  // from one unit to the next: avoids bank conflicts along units and along rows
constexpr int MAX_SUMS = 28;      // sums that a lane keeps in registers in a forward or backward pass
constexpr double HALF_LOG_TWO_PI = 0.91893853320467274178;

struct alignas(16) Pack { REAL at[PACK]; };
__device__ inline Pack load(const REAL* from) { return *reinterpret_cast<const Pack*>(from); }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The parameter of the kernel. cuda/api.py mirrors it field by field, and a test compares the two.
struct Arguments {
  const REAL* x;              // [input][padded row]
  const REAL* y;              // [target][padded row], class labels as reals
  const REAL* loc;            // [slot], of the prior
  const REAL* precision;      // [slot], of the prior
  const double* scale;        // [target], the noise scale where it is fixed
  const int* offset;          // [slot], offset in a parameter vector, or -1 for padding
  long long rows;
  long long padded;
  long long dim;              // length of a parameter vector
  double weight;              // 1 / temperature of the likelihood
  REAL* theta;                // [chain][dim]
  REAL* momentum;             // [chain][dim]
  REAL* gradient;             // [chain][dim]
  double* log_likelihood;     // [chain]
  const REAL* step_size;      // [chain]
  const REAL* inverse_mass;   // [dim], or null for ones
  const int* steps;           // [chain], negative for an evaluation without steps
  REAL* partial;              // [chain][BLOCKS + 1][slot], gradients of blocks and their total
  double* partial_value;      // [chain][BLOCKS]
  unsigned* arrivals;         // [chain], zero at launch
  double kick[DRIFTS + 1];
  double drift[DRIFTS];
};
