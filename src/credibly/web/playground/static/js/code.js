// The lines of credibly that reproduce a panel's numbers.

import { METHODS } from "./methods.js";

const list = (values) => `[${values.join(", ")}]`;
const python = (value) => (typeof value === "string" ? `"${value}"` : String(value));
const float = (value) => (Number.isInteger(value) ? `${value}.0` : String(value));

export function problemLines(request) {
  const { data, model, scene } = request;
  const classes = scene === "classification";
  const inputs = data.x[0].length;
  const rows = inputs === 1 ? list(data.x.map(([x]) => float(x))) : list(data.x.map((row) => list(row.map(float))));
  const predicted = model.noise === "predicted" && !classes;
  const likelihood = classes
    ? "Bernoulli()"
    : predicted
      ? "HeteroscedasticGaussian(floor=0.02)"
      : `Gaussian(scale=${model.noise})`;
  const temperatures = [model.likelihood_temperature, model.prior_temperature];
  const tempering = temperatures.every((t) => t === 1)
    ? ""
    : `, temperature=cr.Tempering(likelihood=${temperatures[0]}, prior=${temperatures[1]})`;
  const hidden = `(${model.hidden.join(", ")}${model.hidden.length === 1 ? "," : ""})`;
  return [
    "import torch, credibly as cr",
    `x = torch.tensor(${rows})${inputs === 1 ? ".unsqueeze(1)" : ""}`,
    `y = torch.tensor(${list(data.y.map(float))})`,
    `net = cr.zoo.mlp(${inputs}, ${hidden}, ${predicted ? 2 : 1}, activation="${model.activation}")`,
    `likelihood, prior = cr.likelihoods.${likelihood}, cr.priors.Normal(scale=${model.prior_scale}, fan_in=True)`,
    `problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=prior${tempering})`,
  ];
}

export function panelCode(request, index, probe) {
  const { method, options } = request.panels[index];
  const settings = Object.entries(options).map(([key, value]) => `${key}=${python(value)}`);
  if (method === "dropout") {
    const layers = request.model.hidden.map((_, i) => `"${2 * (i + 1)}"`);
    settings.push(`insert=(${layers.join(", ")}${layers.length === 1 ? "," : ""})`);
  }
  settings.push('init="fresh"');
  return [
    ...problemLines(request),
    `posterior = cr.${METHODS[method].class}(${settings.join(", ")}).fit(problem, seed=${request.seed})`,
    `p = posterior.predict(torch.tensor([${list(probe.map(float))}]))`,
    "print(p.mean, p.aleatoric, p.epistemic)",
  ].join("\n");
}
