// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The contract of a stage: what it declares, what it is given, what it may answer.
 *
 * A stage is a value made by `define`. It sees one message at its load level, asks the services
 * it names in `uses`, and returns a `Verdict`. It never touches the queue. Pure.
 */
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Context from "effect/Context"
import type * as DateTime from "effect/DateTime"
import type * as Option from "../config/Option.ts"
import type * as Header from "../mail/Header.ts"
import type { State } from "./State.ts"
import type { Verdict, WorldFailure } from "./Verdict.ts"

/** How much of a message a stage needs; each level has all of the one before it. */
export type Load = "metadata" | "headers" | { readonly prefix: number } | "full"

/** What repeating a run does outside the database (ARCHITECTURE: effects and repetition). */
export type Effects = "none" | "keyed" | "once"

/** A body or a header could not be loaded while the stage ran. */
export class LoadFailed extends Schema.TaggedError<LoadFailed>()("LoadFailed", {
  cause: Schema.Defect()
}) {
  readonly status = "4.3.0" as const
  override readonly message = "the rest of the message could not be loaded"
}

/** Level metadata: the row without its octets. */
export interface Metadata {
  readonly id: number
  readonly rev: number
  /** Queue id: names the message in Received, in files and in the log. */
  readonly token: string
  /** MAIL FROM without brackets; "" = null sender. */
  readonly sender: string
  /** RCPT TO, at least one. */
  readonly recipients: ReadonlyArray<string>
  readonly fromHeader: string | null
  readonly subject: string | null
  readonly section: string
  readonly state: State
  /** Octets of header, empty line and body. */
  readonly sizeBytes: number
  readonly hdrFlags: number | null
  readonly messageId: string | null
  readonly listId: string | null
  /** Settings of the addresses that apply: address to settings. */
  readonly settings: { readonly [address: string]: { readonly [key: string]: unknown } }
  readonly receivedAt: DateTime.Utc
  /** Deferrals at this section so far. */
  readonly attempts: number
  /** It may have run here before: look before an outside effect. */
  readonly repeat: boolean
  /** One more SELECT, unless the header is here already. */
  readonly needHeaders: Effect.Effect<WithHeaders, LoadFailed>
  /** One more SELECT, unless the first `bytes` of the body are here already. */
  readonly needPrefix: (bytes: number) => Effect.Effect<WithBody, LoadFailed>
  /** One more SELECT, unless the body is here already. */
  readonly needBody: Effect.Effect<WithBody, LoadFailed>
}
/** Level headers. */
export interface WithHeaders extends Metadata {
  readonly header: Header.Header
}
/** Level full, and prefix(n): then `body` is the first n octets or all of it. */
export interface WithBody extends WithHeaders {
  readonly body: Uint8Array
}
/** What a stage of that level is given. */
export type Mail<L extends Load = Load> = L extends "metadata"
  ? Metadata
  : L extends "headers"
    ? WithHeaders
    : WithBody

type Uses = ReadonlyArray<Context.Key<any, any>>

/** What an author writes. */
export interface Declaration<L extends Load, U extends Uses, O extends Option.Options> {
  /** The word after PROGRAM; equals the file name. */
  readonly name: string
  /** The least load level; `loadFor` may ask for more when the settings need it. */
  readonly load: L
  readonly loadFor?: (settings: Option.Values<O>) => Load
  readonly effect: Effects
  /** Whether it may run behind another stage in one worker, unless its section says no. */
  readonly fusible: boolean
  /** Whether its section needs NEXT. */
  readonly next: "required" | "none"
  /**
   * It may hold a message back (defer, park) by rule, so that a cycle through it is no endless
   * loop.
   */
  readonly waits?: boolean
  /** The services `run` asks. */
  readonly uses: U
  readonly settings: O
  readonly run: (
    mail: Mail<L>,
    settings: Option.Values<O>
  ) => Effect.Effect<Verdict, WorldFailure, Context.Service.Identifier<U[number]>>
}

/** A stage as the wiring and the worker see it; `R` = the services its run asks. */
export interface Stage<out R = unknown> {
  readonly name: string
  readonly load: Load
  readonly loadFor: (settings: Settings) => Load
  readonly effect: Effects
  readonly fusible: boolean
  readonly next: "required" | "none"
  readonly waits: boolean
  /** Keys of the services, for the manual and for building no other layer. */
  readonly uses: ReadonlyArray<string>
  readonly settings: Option.Options
  readonly run: (mail: WithBody, settings: Settings) => Effect.Effect<Verdict, WorldFailure, R>
}

/** Decoded settings of a section, before a stage's own types are put on them. */
export type Settings = { readonly [name: string]: unknown }

/** Checks a stage against its own declaration; the file's default export. */
export const define = <const L extends Load, const U extends Uses, const O extends Option.Options>(
  declaration: Declaration<L, U, O>
): Stage<Context.Service.Identifier<U[number]>> => ({
  name: declaration.name,
  load: declaration.load,
  // The casts are sound: the worker loads at this level and decodes with these settings.
  loadFor: (settings) => declaration.loadFor?.(settings as Option.Values<O>) ?? declaration.load,
  effect: declaration.effect,
  fusible: declaration.fusible,
  next: declaration.next,
  waits: declaration.waits ?? false,
  uses: declaration.uses.map((key) => key.key),
  settings: declaration.settings,
  run: (mail, settings) => declaration.run(mail as unknown as Mail<L>, settings as Option.Values<O>)
})

const rank = (load: Load): number =>
  load === "metadata"
    ? 0
    : load === "headers"
      ? 1
      : load === "full"
        ? Number.POSITIVE_INFINITY
        : 2 + load.prefix

/** The level that serves both. */
export const maxLoad = (a: Load, b: Load): Load => (rank(a) >= rank(b) ? a : b)

/** Whether a message loaded at `have` serves a stage that needs `need`. */
export const serves = (have: Load, need: Load): boolean => rank(have) >= rank(need)
