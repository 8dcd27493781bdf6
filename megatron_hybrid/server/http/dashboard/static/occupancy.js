// What the engine's figures say about who holds the cache's memory. Keys may be missing.

import { FILES, HOST, KV, STATE } from "./explanations.js";

const SHADES = 5; // of cached things, from fresh to old; style.css has as many

/** KV blocks as the parts of a bar. */
export function blocks(engine) {
  const used = engine.kv_used ?? 0;
  const idle = engine.kv_evictable ?? 0; // cached and not in use: the parts make up the whole
  return [
    { label: "in use", kind: "used", count: used, means: KV.used },
    ...cached(engine.kv_cached_by_age, idle, KV.cached),
    {
      label: "free", kind: "free", means: KV.free,
      count: engine.kv_free ?? free(engine.kv_blocks, used + idle),
    },
  ];
}

/** State slots as the parts of a bar. */
export function slots(engine) {
  const live = engine.state_live ?? 0;
  const kept = engine.state_cached ?? 0;
  return [
    { label: "live", kind: "used", count: live, means: STATE.used },
    ...cached(engine.state_cached_by_age, kept, STATE.cached),
    {
      label: "free", kind: "free", means: STATE.free,
      count: engine.state_free ?? free(engine.state_slots, live + kept),
    },
  ];
}

/** Megabytes behind the caches of the device as the parts of a bar; nothing, where there are none. */
function tier(engine, name, means) {
  const total = megabytes(engine.tier_bytes?.[name]);
  const used = megabytes(engine.tier_bytes_used?.[name]);
  return total === 0 ? [] : [
    { label: "kept", kind: "cached-0", count: used, means: means.used },
    { label: "free", kind: "free", count: free(total, used), means: means.free },
  ];
}

export const host = (engine) => tier(engine, "host", HOST);

export const files = (engine) => tier(engine, "disk", FILES);

const megabytes = (bytes) => Math.round((bytes ?? 0) / 2 ** 20);

const free = (total, taken) => Math.max(0, (total ?? 0) - taken);

/** Each age a part of its own, if the engine tells ages. */
function cached(byAge, count, means) {
  if (!Array.isArray(byAge) || byAge.length === 0) {
    return [{ label: "cached", kind: "cached-0", count, means }];
  }
  return byAge.map(([age, number], i) => ({
    label: `cached ${age}`, kind: `cached-${Math.min(i, SHADES - 1)}`, count: number, means,
  }));
}
