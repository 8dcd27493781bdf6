// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const whole = (value) => (isNumber(value) ? WHOLE.format(value) : "–");
export const compact = (value) => (isNumber(value) ? COMPACT.format(value) : "–");

/** Whole per cent; 0 % and 100 % only where they are exact. */
export function percent(part, total) {
  if (!isNumber(part) || !isNumber(total) || total <= 0) return "–";
  const rounded = Math.round((100 * part) / total);
  if (rounded === 0 && part > 0) return "<1 %";
  if (rounded === 100 && part < total) return ">99 %";
  return `${rounded} %`;
}

/** Seconds, as milliseconds where those say more. */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** Something a second; one decimal below ten. */
export function rate(value) {
  if (!isNumber(value)) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : WHOLE.format(value);
}
