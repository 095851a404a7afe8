/** Elements are made here, and text enters them as text nodes only: nothing on this page is ever parsed as markup. */

/**
 * An element.
 * @param {string} tag
 * @param {Object<string, *>} [properties] attributes; `class`, `text`, `on` (listeners by event) and `vars` (CSS variables) too
 * @param {...(Node|string|null)} children
 * @returns {HTMLElement}
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name === "on") for (const [type, listener] of Object.entries(value)) made.addEventListener(type, listener);
    else if (name === "vars") for (const [variable, given] of Object.entries(value)) made.style.setProperty(variable, given);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html has no element ${id}`);
  return found;
}

/** Changes the text only if it differs: screen readers and selections are left alone otherwise. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute only if it differs. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Sets a CSS variable only if it differs. */
export function setVariable(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/**
 * A list whose items keep their elements while their keys stay: focus and hovering survive an update.
 * @template T
 */
export class KeyedList {
  /**
   * @param {HTMLElement} parent
   * @param {(key: string) => {node: HTMLElement, update: (item: T) => void}} make
   */
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.made = new Map();
  }

  /** @param {T[]} items @param {(item: T) => string} keyOf */
  show(items, keyOf) {
    const kept = new Set();
    let after = null;
    for (const item of items) {
      const key = keyOf(item);
      if (kept.has(key)) continue;
      kept.add(key);
      let entry = this.made.get(key);
      if (!entry) this.made.set(key, (entry = this.make(key)));
      entry.update(item);
      const place = after ? after.nextSibling : this.parent.firstChild;
      if (place !== entry.node) this.parent.insertBefore(entry.node, place);
      after = entry.node;
    }
    for (const [key, entry] of this.made) {
      if (kept.has(key)) continue;
      entry.node.remove();
      this.made.delete(key);
    }
  }
}

/** Says something politely to screen readers. */
export function announce(text) {
  setText(byId("announcer"), text);
}
