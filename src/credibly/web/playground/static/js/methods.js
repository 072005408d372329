// The methods a panel can show: their names, their settings and what to look for.

export const METHODS = {
  mle: {
    label: "MLE",
    class: "MLE",
    say: "The weights with the highest likelihood: noise, but no model uncertainty.",
  },
  map: {
    label: "MAP",
    class: "MAP",
    say: "The weights with the highest posterior density: a single function, as confident in a gap as on the data.",
  },
  ensemble: {
    label: "Deep ensemble",
    class: "DeepEnsemble",
    say: "Ten networks from ten starting points: where they disagree, the data do not decide.",
  },
  dropout: {
    label: "MC-Dropout",
    class: "MCDropout",
    say: "Dropout stays on: every pass is a draw from an approximate posterior.",
  },
  bbb: {
    label: "Bayes by Backprop",
    class: "BayesByBackprop",
    say: "A Gaussian over every weight, by the variational free energy: factorised, so less flexible than the posterior.",
  },
  laplace: {
    label: "Laplace",
    class: "Laplace",
    say: "A Gaussian around the mode, from its curvature: local, but fast.",
  },
  sghmc: {
    label: "SGHMC",
    class: "SGHMC",
    say: "Gradient steps with momentum, friction and noise: near the posterior, without a Metropolis step.",
  },
  hmc: {
    label: "HMC",
    class: "HMC",
    say: "Chains on the posterior itself: the reference for all others, once R-hat is near 1.",
  },
};

// The settings of a method's fit, sent to the engine and printed in the panel's code.
export function options(method, { chains, rate }) {
  switch (method) {
    case "ensemble":
      return { members: 10, steps: 1000 };
    case "dropout":
      return { rate, steps: 1500 };
    case "bbb":
      return { steps: 800, lr: 0.03 };
    case "sghmc":
      return { chains: 2 * chains, warmup: 2000, draws: 40, thin: 50 };
    case "hmc":
      // With half the warm-up, one fit in four has a chain that adapted badly: too few effective draws.
      return { chains, warmup: 200, draws: 500 };
    default:
      return { steps: 1500 };
  }
}

export const CHAINED = ["hmc", "sghmc"];
