// The last minute of figures that count from the server's start.

const SECONDS = 60;

export class LastMinute {
  constructor() {
    this.samples = []; // oldest first; a sample has `time` in seconds and the engine's figures
  }

  /** Figures that are lower than before are those of another engine. */
  add(sample) {
    const { samples } = this;
    if (samples.at(-1)?.generated_tokens > sample.generated_tokens) samples.length = 0;
    samples.push(sample);
    while (samples[1]?.time <= sample.time - SECONDS) samples.shift();
  }

  /** By how much a figure has grown. */
  grown(name) {
    return this.samples.at(-1)[name] - this.samples[0][name];
  }

  /** The middle of a latency's observations, in seconds; undefined without any. */
  median(name) {
    const [before, now] = [this.samples[0], this.samples.at(-1)].map(({ latency }) => latency?.[name]);
    const wanted = (now?.count - before?.count) / 2;
    if (!(wanted > 0)) return undefined;
    let [low, below] = [0, 0];
    for (const [i, [high, count]] of now.buckets.entries()) {
      const upTo = count - before.buckets[i][1];
      // As the engine does it: as if a bucket's observations lay at even distances.
      if (upTo >= wanted) return low + ((wanted - below) / (upTo - below)) * (high - low);
      [low, below] = [high, upTo];
    }
    return low; // beyond all bounds
  }
}
