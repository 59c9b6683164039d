// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Counters of stages and of a dispatcher, as a monoid: `add` merges in any order, `empty` is
 * neutral. A stage run inside a chain counts as if it had been dispatched. Pure.
 */

/** What one section did. Times in microseconds. */
export interface SectionStats {
  readonly processed: number
  readonly done: number
  readonly deferred: number
  readonly parked: number
  readonly failed: number
  readonly crashes: number
  readonly fenced: number
  readonly overloads: number
  /** Part of `processed`: runs behind another stage in one worker. */
  readonly fused: number
  readonly busyMicros: number
  readonly waitMicros: number
  /** Bucket i counts runs shorter than 2^i microseconds and not shorter than 2^(i-1). */
  readonly histogram: ReadonlyArray<number>
  readonly lastError: string | undefined
}

/** What one dispatcher did. */
export interface DispatchStats {
  /** Messages that left the queue; one that was fanned out counts by its children. */
  readonly messagesProcessed: number
  readonly handedOut: number
  readonly wakeups: number
  readonly polls: number
  readonly promoted: number
  readonly overloads: number
  /** Settled, but the report was lost with its worker. */
  readonly unreported: number
  /** Settles repeated after a deadlock. */
  readonly retries: number
}

export interface Stats {
  readonly dispatch: DispatchStats
  readonly sections: { readonly [section: string]: SectionStats }
}

export const emptySection: SectionStats = {
  processed: 0,
  done: 0,
  deferred: 0,
  parked: 0,
  failed: 0,
  crashes: 0,
  fenced: 0,
  overloads: 0,
  fused: 0,
  busyMicros: 0,
  waitMicros: 0,
  histogram: [],
  lastError: undefined
}

export const emptyDispatch: DispatchStats = {
  messagesProcessed: 0,
  handedOut: 0,
  wakeups: 0,
  polls: 0,
  promoted: 0,
  overloads: 0,
  unreported: 0,
  retries: 0
}

export const empty: Stats = { dispatch: emptyDispatch, sections: {} }

/** How a run of a stage ended. */
export type RunResult = "pass" | "done" | "defer" | "park" | "fail" | "fanout"

/** One run of a stage on one message. */
export interface Run {
  readonly section: string
  readonly result: RunResult
  readonly micros: number
  readonly fused: boolean
}

/** 40 buckets reach beyond six days. */
const maxBucket = 39

/** The bucket of a time: the least i with micros < 2^i. */
export const bucket = (micros: number): number => {
  let i = 0
  while (i < maxBucket && micros >= 2 ** i) i++
  return i
}

/** The statistics of one run. */
export const ofRun = (run: Run): SectionStats => {
  const last = bucket(run.micros)
  const histogram = Array.from({ length: last + 1 }, (_, i) => (i === last ? 1 : 0))
  return {
    ...emptySection,
    processed: 1,
    done: run.result === "done" || run.result === "fanout" ? 1 : 0,
    deferred: run.result === "defer" ? 1 : 0,
    parked: run.result === "park" ? 1 : 0,
    failed: run.result === "fail" ? 1 : 0,
    fused: run.fused ? 1 : 0,
    busyMicros: run.micros,
    histogram
  }
}

/** Both together; the later `lastError` wins. */
export const addSection = (a: SectionStats, b: SectionStats): SectionStats => ({
  processed: a.processed + b.processed,
  done: a.done + b.done,
  deferred: a.deferred + b.deferred,
  parked: a.parked + b.parked,
  failed: a.failed + b.failed,
  crashes: a.crashes + b.crashes,
  fenced: a.fenced + b.fenced,
  overloads: a.overloads + b.overloads,
  fused: a.fused + b.fused,
  busyMicros: a.busyMicros + b.busyMicros,
  waitMicros: a.waitMicros + b.waitMicros,
  histogram: Array.from(
    { length: Math.max(a.histogram.length, b.histogram.length) },
    (_, i) => (a.histogram[i] ?? 0) + (b.histogram[i] ?? 0)
  ),
  lastError: b.lastError ?? a.lastError
})

const addDispatch = (a: DispatchStats, b: DispatchStats): DispatchStats => ({
  messagesProcessed: a.messagesProcessed + b.messagesProcessed,
  handedOut: a.handedOut + b.handedOut,
  wakeups: a.wakeups + b.wakeups,
  polls: a.polls + b.polls,
  promoted: a.promoted + b.promoted,
  overloads: a.overloads + b.overloads,
  unreported: a.unreported + b.unreported,
  retries: a.retries + b.retries
})

/** Both together. */
export const add = (a: Stats, b: Stats): Stats => {
  const sections: { [section: string]: SectionStats } = { ...a.sections }
  for (const [name, stats] of Object.entries(b.sections)) {
    sections[name] = sections[name] === undefined ? stats : addSection(sections[name], stats)
  }
  return { dispatch: addDispatch(a.dispatch, b.dispatch), sections }
}

/** The statistics of one section. */
export const inSection = (section: string, stats: Partial<SectionStats>): Stats => ({
  dispatch: emptyDispatch,
  sections: { [section]: { ...emptySection, ...stats } }
})

/** The statistics of the dispatcher alone. */
export const inDispatch = (stats: Partial<DispatchStats>): Stats => ({
  dispatch: { ...emptyDispatch, ...stats },
  sections: {}
})

/** Nothing to write. */
export const isEmpty = (stats: Stats): boolean =>
  Object.keys(stats.sections).length === 0 && Object.values(stats.dispatch).every((n) => n === 0)

/** The time below which the given part (0 to 1) of the runs stayed, in microseconds; 0 for none. */
export const quantile = (histogram: ReadonlyArray<number>, part: number): number => {
  const total = histogram.reduce((a, b) => a + b, 0)
  let seen = 0
  for (let i = 0; i < histogram.length; i++) {
    seen += histogram[i]!
    if (total > 0 && seen >= total * part) return 2 ** i
  }
  return 0
}

/** A sum that grows in place: what a dispatcher counts between two flushes. */
export class Tally {
  #dispatch: { -readonly [K in keyof DispatchStats]: DispatchStats[K] } = { ...emptyDispatch }
  readonly #sections = new Map<string, { -readonly [K in keyof SectionStats]: SectionStats[K] }>()
  #empty = true
  #notable = false

  get isEmpty(): boolean {
    return this.#empty
  }
  /** More than looks at the table has been counted. */
  get isNotable(): boolean {
    return this.#notable
  }

  /** One run of a stage; the same as adding `ofRun`, without its garbage. */
  run({ fused, micros, result, section }: Run): void {
    const sum = this.#section(section)
    const at = bucket(micros)
    const histogram = sum.histogram as Array<number>
    while (histogram.length <= at) histogram.push(0)
    histogram[at]!++
    sum.processed++
    sum.busyMicros += micros
    if (fused) sum.fused++
    if (result === "done" || result === "fanout") sum.done++
    else if (result === "defer") sum.deferred++
    else if (result === "park") sum.parked++
    else if (result === "fail") sum.failed++
  }

  /** Adds to counters of a section. */
  section(name: string, stats: Partial<SectionStats>): void {
    const sum = this.#section(name)
    const added = addSection(sum, { ...emptySection, ...stats })
    Object.assign(sum, added)
  }

  /** Adds to counters of the dispatcher. */
  dispatch(stats: Partial<DispatchStats>): void {
    this.#empty = false
    this.#notable ||= Object.keys(stats).some((key) => key !== "polls" && key !== "wakeups")
    this.#dispatch = addDispatch(this.#dispatch, { ...emptyDispatch, ...stats })
  }

  /** The sum since the last take. */
  take(): Stats {
    const taken: Stats = { dispatch: this.#dispatch, sections: Object.fromEntries(this.#sections) }
    this.#dispatch = { ...emptyDispatch }
    this.#sections.clear()
    this.#empty = true
    this.#notable = false
    return taken
  }

  #section(name: string) {
    this.#empty = false
    this.#notable = true
    let sum = this.#sections.get(name)
    if (sum === undefined) {
      sum = { ...emptySection, histogram: [] }
      this.#sections.set(name, sum)
    }
    return sum
  }
}
