// Inside HMC: every leapfrog step of every trajectory on a density of two variables.

import { Orbit, Plane, Training } from "./core.js";
import { makeModel } from "./fits.js";

const CELLS = 81;
// Steps of the MAP fits that span the plane through a network's posterior.
const PLANE_STEPS = 800;
const WINDOWS = { banana: [-4, 4, -3, 5], funnel: [-6, 6, -5, 5], modes: [-4, 4, -3, 3] };
const STARTS = {
  banana: [[-1.5, 0.5], [1.5, 0.5], [0, -1], [-2, 1]],
  funnel: [[0, 1], [1, 2], [-1, 2], [0, 0]],
  modes: [[-2, 0], [2, 0], [-2, 0.5], [2, 0.5]],
};
// Most steps of a trajectory, and coordinates that are no longer drawn.
const MAX_STEPS = 400;
const FAR = 1e6;

const finite = (value) => (Number.isFinite(value) ? value : null);

export class OrbitRun {
  constructor(core, request, post) {
    Object.assign(this, { core, request, post, owned: [] });
  }

  own(object) {
    this.owned.push(object);
    return object;
  }

  end() {
    for (const object of this.owned.reverse()) object.delete();
  }

  *steps() {
    const { density, chains, stepSize, trajectories, seed } = this.request;
    const { plane, window, starts } = density === "network" ? yield* this.networkPlane() : this.namedPlane();
    const [x, y] = [[window[0], window[1], CELLS], [window[2], window[3], CELLS]];
    this.post({ type: "surface", x, y, log_density: Array.from(plane.surface(x, y), finite) });
    const length = Math.min(this.request.length, MAX_STEPS * stepSize);
    const orbit = this.own(new Orbit(plane, { chains, stepSize, length, seed }));
    for (let chain = 0; chain < chains; ++chain) orbit.start(chain, starts[chain % starts.length]);
    for (let iteration = 0; iteration < trajectories; ++iteration) {
      for (let chain = 0; chain < chains; ++chain) {
        const { path, energyError, acceptance, accepted, divergent } = orbit.advance(chain, iteration);
        // A point that is too far to draw ends the path.
        const drawn = path.filter((point) => point.every((value) => Math.abs(value) < FAR));
        this.post({
          type: "trajectory", chain, iteration, path: drawn, acceptance, accepted, divergent,
          energy_error: Array.from(energyError.slice(0, drawn.length), finite),
        });
        yield;
      }
    }
    const { meanAcceptance, divergences, gradients } = orbit.report;
    const { rhat, ess } = orbit.convergence;
    // Chains that never moved have no effective draws, although their autocorrelation suggests some.
    const moved = Number.isFinite(rhat);
    this.post({ type: "finished", acceptance: meanAcceptance, divergences, gradients, rhat: finite(rhat), ess: moved ? finite(ess) : null });
  }

  namedPlane() {
    const { density } = this.request;
    return { plane: this.own(Plane.named(this.core, density)), window: WINDOWS[density], starts: STARTS[density] };
  }

  // The plane through three MAP fits: the first is the origin and the second lies on the first axis.
  *networkPlane() {
    const model = this.own(makeModel(this.core, { ...this.request, classes: false }));
    const training = this.own(new Training(model, { members: 3, steps: PLANE_STEPS, seed: this.request.seed }));
    while (training.done < PLANE_STEPS) {
      training.advance(10);
      yield;
    }
    const plane = this.own(Plane.through(model, training.theta));
    const points = plane.corners();
    const low = [0, 1].map((axis) => Math.min(...points.map((point) => point[axis])));
    const high = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])));
    // A square window, so that distances look alike in both directions.
    const half = 0.75 * Math.max(high[0] - low[0], high[1] - low[1]);
    const window = [0, 1].flatMap((axis) => {
      const centre = (low[axis] + high[axis]) / 2;
      return [centre - half, centre + half];
    });
    return { plane, window, starts: points };
  }
}
