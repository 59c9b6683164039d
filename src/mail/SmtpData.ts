// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The message that follows DATA, read from segments of any size (RFC 5321 sections 2.3.8, 4.1.1.4
 * and 4.5.2): finds the one true end, takes the added dots away, keeps every other octet.
 *
 * Only CR LF "." CR LF ends the message. What else looks like an end to some other server holds a
 * bare CR or LF and spoils the message; so do NUL, an overlong line and an overlong message. A
 * spoiled message is no longer stored but still read, so that what follows its end, and only that,
 * is taken for a command. No I/O.
 */

/** Why a message is not taken, by what was seen first. */
export type Fault = "size" | "memory" | "bare newline" | "nul" | "line"

export interface Limits {
  /** Octets of the message after the added dots are gone (RFC 1870 section 5). */
  readonly sizeBytes: number
  /** Octets of a line without its CRLF. */
  readonly lineBytes: number
}

/** Octets of memory that all sessions share. */
export interface Budget {
  /** Takes so many octets, if there are. */
  readonly reserve: (bytes: number) => boolean
  readonly release: (bytes: number) => void
}

/** A message as far as it has come in. */
export interface Incoming {
  /** Octets that have come in so far, stored or not. */
  readonly seenBytes: () => number
  /** Reads a segment. A number = the message ended before that offset of the segment. */
  readonly push: (segment: Uint8Array) => number | undefined
  readonly fault: () => Fault | undefined
  /** The message; valid until `dispose`. */
  readonly octets: () => Uint8Array
  /** Gives the memory back. May be called again. */
  readonly dispose: () => void
}

const CR = 13
const LF = 10
const DOT = 46
const NUL = 0

const isSpecial = (octet: number): boolean => octet === CR || octet === LF || octet === NUL

/** The least that is reserved; a small message in one segment takes no more than it is. */
const firstBytes = 1024

/**
 * Up to here a block grows to twice its size. Beyond, to five quarters: a large message shall not
 * hold almost as much again that it never fills.
 */
const doublingBytes = 8 * 1024 * 1024

/**
 * Where the reader stands: at the start of a line; behind a dot that starts a line; behind such a
 * dot and CR; inside a line; behind a CR inside a line.
 */
type Place = "start" | "dot" | "dot cr" | "line" | "cr"

export const make = (limits: Limits, budget: Budget): Incoming => {
  const store = makeStore(limits.sizeBytes, budget)
  let place: Place = "start"
  let lineBytes = 0
  let seenBytes = 0

  /** Reads one line's octets up to CR, LF, NUL or the end of the segment. */
  const run = (segment: Uint8Array, from: number): number => {
    let at = from
    while (at < segment.length && !isSpecial(segment[at]!)) at++
    lineBytes += at - from
    if (lineBytes > limits.lineBytes) store.spoil("line")
    if (at === segment.length) return at
    if (segment[at] === CR) place = "cr"
    else store.spoil(segment[at] === LF ? "bare newline" : "nul")
    return at + 1
  }

  const push = (segment: Uint8Array): number | undefined => {
    seenBytes += segment.length
    let at = 0
    let unstored = 0
    while (at < segment.length) {
      const octet = segment[at]!
      if (place === "line") at = run(segment, at)
      else if (place === "start") {
        place = octet === DOT ? "dot" : "line"
        lineBytes = 0
        if (octet !== DOT) continue
        store.append(segment, unstored, at)
        unstored = ++at
      } else if (place === "dot") {
        place = octet === CR ? "dot cr" : "line"
        if (octet === CR) unstored = ++at
      } else if (octet === LF) {
        at++
        if (place === "dot cr") return at
        place = "start"
      } else {
        store.spoil("bare newline")
        place = "line"
      }
    }
    store.append(segment, unstored, segment.length)
    return undefined
  }

  return {
    seenBytes: () => seenBytes,
    push,
    fault: store.fault,
    octets: store.octets,
    dispose: store.dispose
  }
}

/**
 * One growing block: segments may be single octets, and an object for each would cost a
 * hundredfold.
 */
const makeStore = (maxBytes: number, budget: Budget) => {
  let block = Buffer.alloc(0)
  let usedBytes = 0
  let fault: Fault | undefined

  const dispose = (): void => {
    budget.release(block.length)
    block = Buffer.alloc(0)
    usedBytes = 0
  }

  const spoil = (first: Fault): void => {
    fault ??= first
    dispose()
  }

  const grow = (neededBytes: number): boolean => {
    const factor = block.length < doublingBytes ? 2 : 1.25
    const larger = Math.max(Math.floor(factor * block.length), firstBytes)
    const bytes = Math.max(neededBytes, Math.min(larger, maxBytes))
    if (!budget.reserve(bytes - block.length)) return false
    const next = Buffer.allocUnsafe(bytes)
    block.copy(next, 0, 0, usedBytes)
    block = next
    return true
  }

  const append = (segment: Uint8Array, from: number, to: number): void => {
    if (fault !== undefined || from >= to) return
    const neededBytes = usedBytes + to - from
    if (neededBytes > maxBytes) return spoil("size")
    if (neededBytes > block.length && !grow(neededBytes)) return spoil("memory")
    block.set(from === 0 && to === segment.length ? segment : segment.subarray(from, to), usedBytes)
    usedBytes = neededBytes
  }

  const octets = (): Uint8Array => block.subarray(0, usedBytes)

  return { append, spoil, dispose, octets, fault: () => fault }
}
