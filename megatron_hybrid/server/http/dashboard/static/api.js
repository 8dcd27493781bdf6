// Requests to this server, with the key where there is one, and its errors as exceptions.

const STORAGE_NAME = "megatron_hybrid.api_key";

/** What the server answered instead of what was asked for; status 0: nothing answered. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

let key = "";
try {
  key = sessionStorage.getItem(STORAGE_NAME) ?? "";
} catch {
  // Storage can be forbidden; the key then lasts as long as the page.
}

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(STORAGE_NAME, value);
  } catch {
    // As above.
  }
}

export const hasKey = () => key !== "";

let onKeyWanted = () => {};

/** `callback(hadKey)` is called whenever the server refuses a request for want of the right key. */
export function whenKeyIsWanted(callback) {
  onKeyWanted = callback;
}

/** Fetch from this server; the answer if it is a success. Throws ApiError, or AbortError. */
export async function call(path, { body, method = body ? "POST" : "GET", signal } = {}) {
  const usedKey = key;
  const headers = {};
  if (usedKey) headers.Authorization = `Bearer ${usedKey}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server does not answer.", 0);
  }
  if (response.ok) return response;
  // An answer to an older key says nothing about the one given since.
  if (response.status === 401 && usedKey === key) onKeyWanted(usedKey !== "");
  throw new ApiError(await errorMessage(response), response.status);
}

async function errorMessage(response) {
  try {
    const { error } = await response.json();
    if (typeof error.message === "string") return error.message;
  } catch {
    // A proxy's page, perhaps.
  }
  return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}
