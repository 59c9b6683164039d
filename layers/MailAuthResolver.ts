// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The DNS as one message sees it, in the shape mailauth asks for: a budget of names, a deadline,
 * each question once, and the error codes of Node. Touches the service Dns only.
 */
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Dns, DnsError, RecordType } from "../src/services/Dns.ts"
import type { Limits } from "../src/services/MailAuth.ts"

/** What mailauth calls; it knows a missing name by the codes ENOTFOUND and ENODATA. */
export type Resolver = (name: string, type: string) => Promise<Array<string>>

export interface Lookups {
  /** Not counted: the library keeps the 10 and 2 of RFC 7208 section 4.6.4. */
  readonly spf: Resolver
  /** Keys of DKIM and ARC. */
  readonly keys: Resolver
  /** Records of DMARC. */
  readonly policy: Resolver
  /** Whether a key had no answer, so that what rests on it may be right or wrong. */
  readonly isKeyTroubled: () => boolean
}

/**
 * Names of one message beyond those of SPF. Of them keys take 12 at most, so that a heap of
 * signatures cannot keep the tree walk of DMARC (8 names) from its answer.
 */
const maxNames = 20
const maxKeys = 12
/** Octets of a key record. An RSA key of 8,192 bits takes 1,400; nothing larger is verified. */
const maxKeyRecord = 4096

const codes: { readonly [D in NonNullable<DnsError["detail"]>]: string } = {
  nxdomain: "ENOTFOUND",
  nodata: "ENODATA",
  name: "EBADNAME",
  timeout: "ETIMEOUT",
  server: "ESERVFAIL"
}

class LookupError extends Error {
  readonly code: string
  constructor(code: string) {
    super(code)
    this.code = code
  }
}

const errorOf = (exit: Exit.Failure<unknown, DnsError>): LookupError => {
  const found = Exit.findErrorOption(exit)
  if (found._tag === "None") return new LookupError("ECANCELLED")
  const { detail, reason } = found.value
  return new LookupError(codes[detail ?? (reason === "absent" ? "nxdomain" : "server")])
}

/**
 * MX is an object for the library, all else the text itself. Its declarations know text only, hence
 * the cast.
 */
const shape = (type: string, records: ReadonlyArray<string>): Array<string> =>
  type !== "MX"
    ? [...records]
    : records.map((record) => {
        const [priority = "0", exchange = ""] = record.split(" ")
        return { priority: Number(priority), exchange } as unknown as string
      })

const isTrouble = (error: unknown): boolean =>
  !(error instanceof LookupError) || ["ETIMEOUT", "ESERVFAIL", "ECANCELLED"].includes(error.code)

/** The view of one message; its questions end with the scope. */
export const make = Effect.fnUntraced(function* (dns: Dns["Service"], limits: Limits) {
  const run = Effect.runPromiseExitWith(yield* Effect.context<never>())
  const { signal } = yield* Effect.acquireRelease(
    Effect.sync(() => new AbortController()),
    // A reason of our own: without one an exception with its stack would be made each time.
    (controller) => Effect.sync(() => controller.abort("done"))
  )
  const total = Duration.toMillis(limits.total)
  const lookup = Duration.toMillis(limits.lookup)
  // DMARC needs the results of the others: it keeps the time of one look-up for itself.
  const reserve = Math.min(lookup, total / 2)
  const start = yield* Clock.currentTimeMillis
  const answers = new Map<string, Promise<ReadonlyArray<string>>>()
  const state = { names: 0, keys: 0, isKeyTroubled: false }

  const question = (name: string, type: string, end: number) =>
    Effect.flatMap(Clock.currentTimeMillis, (now) => {
      const patience = Math.max(0, Math.min(lookup, end - now))
      return Effect.timeoutOption(dns.resolve(name, type as RecordType), patience)
    })

  const ask = (name: string, type: string, end: number): Promise<ReadonlyArray<string>> =>
    run(question(name, type, end), { signal }).then((exit) => {
      if (Exit.isFailure(exit)) throw errorOf(exit)
      if (exit.value._tag === "None") throw new LookupError("ETIMEOUT")
      return exit.value.value
    })

  /** `spend` says whether the budget has room for one more name. */
  const view = (end: number, spend: () => boolean) => (name: string, type: string) => {
    const key = `${type} ${name.toLowerCase()}`
    const known = answers.get(key)
    if (known !== undefined) return known
    // Beyond the budget there is nothing: a sender who asks for too much proves nothing, and must
    // not get the benefit of doubt that trouble of the DNS gets.
    if (!spend()) return Promise.reject(new LookupError("ENOTFOUND"))
    const answer = ask(name, type, end)
    answer.catch(() => undefined) // who asks sees it; what is fetched ahead may have nobody yet
    answers.set(key, answer)
    return answer
  }

  const spendName = (): boolean => state.names < maxNames && ++state.names > 0
  const spendKey = (): boolean => state.keys < maxKeys && spendName() && ++state.keys > 0
  const early = start + total - reserve
  const spf = view(early, () => true)
  const key = view(early, spendKey)
  const policy = view(start + total, spendName)

  const keys: Resolver = (name, type) =>
    key(name, type).then(
      (records) => {
        const isHuge = records.some((record) => record.length > maxKeyRecord)
        if (isHuge) throw new LookupError("EINVALIDVAL")
        return shape(type, records)
      },
      (error: unknown) => {
        if (isTrouble(error)) state.isKeyTroubled = true
        // What cannot be a name has no key for good; the library would call it temporary.
        const isNoName = error instanceof LookupError && error.code === "EBADNAME"
        throw isNoName ? new LookupError("ENOTFOUND") : error
      }
    )

  const lookups: Lookups = {
    spf: (name, type) => spf(name, type).then((records) => shape(type, records)),
    keys,
    policy: (name, type) => policy(name, type).then((records) => shape(type, records)),
    isKeyTroubled: () => state.isKeyTroubled
  }
  return lookups
})
