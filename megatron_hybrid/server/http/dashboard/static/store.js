// Chats in this browser's IndexedDB: their titles apart from them, so that a list is read quickly.

const NAME = "megatron_hybrid";
const VERSION = 1;

/** A chat is { id, title, changed, settings, turns }, `changed` in milliseconds since 1970. */
export class Store {
  /** Throws DOMException where the browser keeps nothing. */
  static async open() {
    const opening = indexedDB.open(NAME, VERSION);
    opening.onupgradeneeded = () => {
      for (const store of ["titles", "chats"]) {
        opening.result.createObjectStore(store, { keyPath: "id" });
      }
    };
    return new Store(await answer(opening));
  }

  constructor(database) {
    this.database = database;
  }

  /** Of every chat { id, title, changed }, the newest first. */
  async list() {
    const titles = await answer(this.database.transaction("titles").objectStore("titles").getAll());
    return titles.sort((a, b) => b.changed - a.changed);
  }

  /** A chat, or undefined. */
  get(id) {
    return answer(this.database.transaction("chats").objectStore("chats").get(id));
  }

  /** Throws DOMException, QuotaExceededError where there is no more room; then nothing changes. */
  put(chat) {
    const { id, title, changed } = chat;
    return this.write((titles, chats) => {
      titles.put({ id, title, changed });
      chats.put(chat);
    });
  }

  delete(id) {
    return this.write((titles, chats) => [titles, chats].forEach((store) => store.delete(id)));
  }

  clear() {
    return this.write((titles, chats) => [titles, chats].forEach((store) => store.clear()));
  }

  /** Both or neither. */
  write(change) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(["titles", "chats"], "readwrite");
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
      change(transaction.objectStore("titles"), transaction.objectStore("chats"));
    });
  }
}

function answer(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
