/**
 * Where each block lies on the map. Pure.
 *
 * The unit is a cell. An extent is a rectangle of `columns` x `rows` cells, and extents lie in lines with `gap` units between
 * them. Block b is cell `b % perExtent` of extent `floor(b / perExtent)`, line by line in both.
 */

export class Layout {
  /**
   * @param {number} numBlocks
   * @param {number} perExtent
   * @param {number} columns of an extent
   * @param {number} across extents in a line
   * @param {number} [gap]
   */
  constructor(numBlocks, perExtent, columns, across, gap = 1) {
    Object.assign(this, { numBlocks, perExtent, columns, across, gap });
    this.rows = Math.ceil(perExtent / columns);
    this.numExtents = Math.ceil(numBlocks / perExtent);
    this.width = Math.min(across, this.numExtents) * (columns + this.gap) + this.gap;
    this.height = Math.ceil(this.numExtents / across) * (this.rows + this.gap) + this.gap;
  }

  /** The left edge of a block's cell. @param {number} block */
  x(block) {
    const extent = Math.floor(block / this.perExtent);
    return this.gap + (extent % this.across) * (this.columns + this.gap) + ((block % this.perExtent) % this.columns);
  }

  /** The upper edge of a block's cell. @param {number} block */
  y(block) {
    const extent = Math.floor(block / this.perExtent);
    return this.gap + Math.floor(extent / this.across) * (this.rows + this.gap) + Math.floor((block % this.perExtent) / this.columns);
  }

  /** The block at a place, or -1. */
  blockAt(x, y) {
    const column = Math.floor((x - this.gap) / (this.columns + this.gap));
    const line = Math.floor((y - this.gap) / (this.rows + this.gap));
    const inX = Math.floor(x - this.gap - column * (this.columns + this.gap));
    const inY = Math.floor(y - this.gap - line * (this.rows + this.gap));
    if (column < 0 || column >= this.across || line < 0 || inX < 0 || inX >= this.columns || inY < 0 || inY >= this.rows) {
      return -1;
    }
    const within = inY * this.columns + inX;
    const block = (line * this.across + column) * this.perExtent + within;
    return within < this.perExtent && block < this.numBlocks ? block : -1;
  }

  /** The rectangle of an extent: [x, y, width, height]. */
  extent(index) {
    const x = this.gap + (index % this.across) * (this.columns + this.gap);
    const y = this.gap + Math.floor(index / this.across) * (this.rows + this.gap);
    return [x, y, this.columns, this.rows];
  }
}

/**
 * The layout with the largest cells for a place of `width` x `height` pixels. Cells of a pixel and more have whole pixels.
 * `largest` and `widestGap` are in pixels.
 * @returns {{layout: Layout, scale: number}} the scale is the size of a cell in pixels
 */
export function fit(numBlocks, perExtent, width, height, largest, widestGap = Infinity) {
  const numExtents = Math.ceil(numBlocks / perExtent);
  for (let scale = Math.max(1, Math.floor(largest)); scale >= 1; scale -= 1) {
    const gap = Math.min(1, Math.round(widestGap) / scale);
    let best = null;
    for (const columns of widths(perExtent)) {
      const across = Math.min(numExtents, Math.floor((width / scale - gap) / (columns + gap)));
      if (across < 1) continue;
      const layout = new Layout(numBlocks, perExtent, columns, across, gap);
      if (layout.height * scale > height) continue;
      const unused = 1 - (layout.width * scale) / width;
      const ragged = (across - (numExtents % across || across)) / numExtents;
      const stretched = Math.abs(Math.log2(columns / layout.rows / 1.3)) / 9;
      const cost = unused + ragged / 2 + stretched;
      if (!best || cost < best.cost) best = { layout, scale, cost };
    }
    if (best) return best;
  }
  return fitSmaller(numBlocks, perExtent, numExtents, width, height);
}

/** As `fit`, for more blocks than pixels: cells are parts of a pixel. */
function fitSmaller(numBlocks, perExtent, numExtents, width, height) {
  let best = null;
  for (const columns of widths(perExtent)) {
    const rows = Math.ceil(perExtent / columns);
    const guess = Math.sqrt((numExtents * (rows + 1) * width) / (height * (columns + 1)));
    for (const across of [Math.floor(guess), Math.ceil(guess)]) {
      const layout = new Layout(numBlocks, perExtent, columns, Math.min(numExtents, Math.max(1, across)));
      const scale = Math.min(width / layout.width, height / layout.height, 1);
      if (!best || scale > best.scale) best = { layout, scale };
    }
  }
  return best;
}

/** Widths of an extent worth a look: not too far from a square, and those that leave no hole if there are any. */
function widths(perExtent) {
  const root = Math.sqrt(perExtent);
  const found = [];
  for (let columns = Math.max(1, Math.floor(root / 2)); columns <= Math.min(perExtent, Math.ceil(root * 3)); columns += 1) {
    if (perExtent % columns === 0) found.push(columns);
  }
  return found.length ? found : [Math.ceil(root), Math.ceil(root * 1.5)];
}
