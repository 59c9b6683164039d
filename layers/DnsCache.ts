// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What is remembered of the DNS: a map with an end to each entry, to their number and to their
 * octets. The entry used longest ago goes first. Touches nothing; the caller says what time it is.
 */
import type * as Exit from "effect/Exit"
import type { DnsError } from "../src/services/Dns.ts"

/** An answer or an absence. */
export type Answer = Exit.Exit<ReadonlyArray<string>, DnsError>

export interface DnsCache {
  /** What is known at the moment `now`, in milliseconds. */
  readonly get: (key: string, now: number) => Answer | undefined
  readonly set: (key: string, entry: { readonly answer: Answer; readonly until: number }) => void
  readonly entries: () => number
  readonly octets: () => number
}

export interface Bounds {
  readonly entries: number
  readonly octets: number
}

interface Entry {
  readonly answer: Answer
  readonly until: number
  readonly octets: number
}

/** What the objects around the texts of one entry take, about. */
const overhead = 300

const weigh = (key: string, answer: Answer): number =>
  answer._tag === "Success"
    ? answer.value.reduce((sum, record) => sum + record.length, overhead + key.length)
    : overhead + key.length

export const make = (bounds: Bounds): DnsCache => {
  // A Map keeps the order of insertion: the first key is the one used longest ago.
  const map = new Map<string, Entry>()
  let octets = 0
  const drop = (key: string): void => {
    octets -= map.get(key)?.octets ?? 0
    map.delete(key)
  }
  return {
    entries: () => map.size,
    octets: () => octets,
    get: (key, now) => {
      const entry = map.get(key)
      if (entry === undefined) return undefined
      map.delete(key)
      if (entry.until <= now) {
        octets -= entry.octets
        return undefined
      }
      map.set(key, entry)
      return entry.answer
    },
    set: (key, { answer, until }) => {
      drop(key)
      const entry = { answer, until, octets: weigh(key, answer) }
      map.set(key, entry)
      octets += entry.octets
      for (const oldest of map.keys()) {
        if (map.size <= bounds.entries && octets <= bounds.octets) return
        drop(oldest)
      }
    }
  }
}
