/** Signing in: an API key is exchanged for a cookie that ends after an hour. The key itself is not kept. */

import { byId, setText } from "./dom.js";

export class Session {
  /** @param {() => void} signedIn */
  constructor(signedIn) {
    this.signedIn = signedIn;
    this.isAdmin = false;
    byId("sign-in").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("sign-out").addEventListener("click", () => this.#end());
    byId("sign-in-open").addEventListener("click", () => this.ask(true));
    byId("sign-in-cancel").addEventListener("click", () => this.#close());
  }

  /** What the server says of this page: mode, whether a key is needed, whether a session is open. */
  async info() {
    const response = await fetch("info", { cache: "no-store" });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const info = await response.json();
    this.isAdmin = Boolean(info.admin);
    byId("sign-out").hidden = !info.signed_in;
    byId("sign-in-open").hidden = info.signed_in || info.needs_key || !info.has_keys;
    return info;
  }

  /** Shows the form. @param {boolean} [freely] whether the page is of use without a key */
  ask(freely = false) {
    byId("sign-in-place").hidden = false;
    byId("content").hidden = true;
    byId("sign-in-cancel").hidden = !freely;
    byId("api-key").focus();
  }

  #close() {
    byId("sign-in-place").hidden = true;
    byId("content").hidden = false;
  }

  async #submit() {
    const field = byId("api-key");
    const said = byId("sign-in-error");
    setText(said, "");
    try {
      const response = await fetch("session", { method: "POST", headers: { authorization: `Bearer ${field.value.trim()}` } });
      if (!response.ok) return setText(said, response.status === 401 ? "This key is not known here." : `The server answered ${response.status}.`);
      this.isAdmin = Boolean((await response.json()).admin);
    } catch {
      return setText(said, "The server does not answer.");
    } finally {
      field.value = "";
    }
    this.#close();
    byId("sign-out").hidden = false;
    byId("sign-in-open").hidden = true;
    this.signedIn();
  }

  async #end() {
    await fetch("session", { method: "DELETE" }).catch(() => {});
    location.reload();
  }
}
