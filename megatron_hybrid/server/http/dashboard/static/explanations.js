// What the figures mean, for those who use the server and have not read how its cache works.

export const TILES = {
  skipped: "Of all prompts since the server started, the share that it did not have to compute, "
    + "because it had kept what came of the same words before. The higher, the sooner answers begin.",
  running: "Answers that are being written at this moment, of everybody who uses this server.",
  waiting: "Requests that wait until there is room for them. If this stays above 0, the server is "
    + "asked for more than it can do.",
  first: "How long people wait for the first word of an answer: half of all requests waited less. "
    + "Cached prompts make it shorter.",
  between: "The time from one token of an answer to the next, about a word: half of all gaps are "
    + "shorter. It says how fast answers are written.",
  generated: "Tokens that the server writes in a second now, for everybody together.",
};

export const KV = {
  used: "Memory that answers in progress need for the words before them. It cannot be taken away.",
  cached: "What is kept of earlier prompts and answers, by the time since somebody last used it. The "
    + "same words again cost nothing; the oldest make room when memory runs out.",
  free: "Memory that nothing has been kept in yet, or that was given back.",
};

export const STATE = {
  used: "Each answer in progress has one state: the model's memory of everything up to now, which "
    + "it overwrites word by word.",
  cached: "Copies of such memories at chosen places, by the time since somebody last used them. A "
    + "prompt can only be skipped up to a place where one was kept.",
  free: "Memory for such states that nothing has been kept in yet.",
};

export const HOST = {
  used: "What the cache has no room for, kept in the computer's own memory. It comes back before an "
    + "answer that needs it begins.",
  free: "Memory that nothing has been kept in yet.",
};

export const FILES = {
  used: "The same in files, which outlast this server and are shared with others on this computer.",
  free: "What files may still take.",
};

export const PREFILL = {
  computed: "Tokens of prompts that the model had to read in a second: the work that the cache "
    + "could not spare.",
  skipped: "Tokens of prompts that came from the cache in a second: work that was not done twice.",
};

export const LOST = {
  state_missing: "These words were known, but no state had been kept so far into them. One is kept "
    + "now: the next such prompt skips them.",
  state_evicted: "The state that would have let us skip these words had to make room for others. "
    + "More memory for states helps.",
  grid: "States can be kept only every so many tokens, and these came after the last such place.",
  prompt_logprobs: "Somebody asked how likely the words of the prompt are, and for that they have "
    + "to be read.",
};

export const TURN_CACHED = "How much of everything said so far came from the cache and was not read "
  + "again. The bar shows the same.";
