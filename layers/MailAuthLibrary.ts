// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * mailauth, part by part and always in its strict mode, as effects. Its parts are loaded at the
 * first message and not before. Touches nothing but the resolver it is given.
 */
import { Readable } from "node:stream"
import * as Data from "effect/Data"
import * as Effect from "effect/Effect"
import type { ARCChainEntry, ARCResult, ARCSealError, DKIMResult, DMARCResult } from "mailauth"
import type { Header } from "../src/mail/Header.ts"
import type { Resolver } from "./MailAuthResolver.ts"

const CR = 13
const LF = 10

/**
 * Octets handed over at a time; between two times other work of the process gets its turn. Lines of
 * one blank, the dearest there are, take up to 10 ms a time; larger pieces are no faster.
 */
const chunkBytes = 16 * 1024

/**
 * The octets of a message; the body is cut behind line ends and never copied. What is not more than
 * one chunk is handed over at once.
 */
export const stream = (header: Uint8Array, body: Uint8Array): Readable => {
  let at = 0
  const next = (): void => {
    const most = Math.min(at + chunkBytes, body.length)
    const lineEnd = most === body.length ? most : body.lastIndexOf(LF, most) + 1
    // A line longer than a chunk does not come this far, but must not stop the stream.
    const end = lineEnd > at ? lineEnd : most
    if (at < end) readable.push(body.subarray(at, end))
    at = end
    if (at >= body.length) readable.push(null)
  }
  const read = body.length <= chunkBytes ? next : () => void setImmediate(next)
  const readable = new Readable({ read })
  readable.push(Buffer.concat([header, Buffer.from("\r\n")]))
  return readable
}

/** What the verifier says of a body and its signatures. */
export interface Signatures {
  readonly dkim: ReadonlyArray<DKIMResult>
  readonly arc: ARCResult & { readonly chain?: ReadonlyArray<ARCChainEntry> }
  /** Of the body in relaxed form. */
  readonly bodyHash: string
}

export interface Dmarc {
  readonly response: DMARCResult | false
  readonly dkimAligned?: ReadonlySet<string>
}

/** A set of three fields, or why there is none. */
export interface ArcSet {
  readonly headers: ReadonlyArray<string>
  readonly errors: ReadonlyArray<ARCSealError>
}

/** Fields as the library keeps them; what belongs to no field belongs to the one before it. */
const parsed = ({ fields, raw }: Header) =>
  fields.map((field, i) => {
    let end = fields[i + 1]?.start ?? raw.length
    while (raw[end - 1] === CR || raw[end - 1] === LF) end--
    const line = Buffer.from(raw.buffer, raw.byteOffset + field.start, end - field.start)
    return { key: field.name.toLowerCase(), casedKey: field.name, line }
  })

export interface Sealing {
  readonly header: Header
  readonly body: Uint8Array
  /** Of the body in relaxed form, if it is known already. */
  readonly bodyHash?: string
  readonly cv: "none" | "pass" | "fail"
  /** What follows `i=N; ` in ARC-Authentication-Results. */
  readonly authResults: string
  readonly signingDomain: string
  readonly selector: string
  /** In PEM: a key object is not refused but silently makes no seal. */
  readonly privateKey: string
  readonly headerList: string
  readonly signTime: Date
}

/**
 * A CommonJS module as Node imports it has names of its own; in our bundle it is all in `default`.
 */
const common = <M extends object>(module: M): M =>
  "default" in module ? (module.default as M) : module

const parts = Effect.promise(() =>
  Promise.all([
    import("mailauth/lib/spf/index.js").then(common),
    import("mailauth/lib/dkim/verify.js").then(common),
    import("mailauth/lib/arc/index.js").then(common),
    import("mailauth/lib/dmarc/index.js").then(common)
  ])
)

type Parts = Effect.Success<typeof parts>

/** The library threw where it should have answered; the cause says what. */
export class LibraryError extends Data.TaggedError("LibraryError")<{ readonly cause: unknown }> {}

const attempt = <A>(f: () => Promise<A>): Effect.Effect<A, LibraryError> =>
  Effect.tryPromise({ try: f, catch: (cause) => new LibraryError({ cause }) })

export interface Checking {
  readonly header: Header
  readonly body: Uint8Array
  readonly resolver: Resolver
  readonly minBitLength: number
}

const make = ([
  { spf },
  { dkimVerify },
  { arc, createSeal, getARChain },
  { evaluateDmarc }
]: Parts) => ({
  spf: (options: Parameters<typeof spf>[0]) => attempt(() => spf({ ...options, strict: true })),

  dmarc: (options: Parameters<typeof evaluateDmarc>[0]): Effect.Effect<Dmarc, LibraryError> =>
    attempt(() => evaluateDmarc({ ...options, strict: true })),

  /** DKIM and ARC in one pass over the body. */
  signatures: Effect.fnUntraced(function* ({ body, header, minBitLength, resolver }: Checking) {
    // A seal without a key is asked for its body hash only, which comes out of the same pass.
    const seal = { signingDomain: "", selector: "", privateKey: "", bodyHash: "" }
    const options = { resolver, minBitLength, strict: true }
    const found = yield* attempt(() =>
      dkimVerify(stream(header.raw, body), { ...options, seal, sender: "<>" })
    )
    const chain = yield* attempt(() => arc(found.arc as Parameters<typeof arc>[0], options))
    return { dkim: found.results, arc: chain, bodyHash: seal.bodyHash } satisfies Signatures
  }),

  seal: Effect.fnUntraced(function* ({ body, header, ...sealing }: Sealing) {
    const headers = { parsed: parsed(header) }
    // A chain that is broken is sealed as cv=fail, over our own set only (RFC 8617 section 5.1.2).
    const chain = yield* Effect.try({
      try: () => getARChain(headers, { strict: true }),
      catch: (cause) => new LibraryError({ cause })
    }).pipe(Effect.orElseSucceed(() => false as const))
    const isHashed = sealing.bodyHash !== undefined
    return yield* attempt(
      (): Promise<ArcSet> =>
        createSeal(isHashed ? false : stream(header.raw, body), {
          ...(isHashed ? { headers } : {}),
          arc: { chain: chain === false ? [] : chain },
          strict: true,
          // The library writes into what it is given.
          seal: { ...sealing } as Parameters<typeof createSeal>[1]["seal"]
        })
    )
  })
})

/** The functions of the library; the first use in a process loads them. */
export const load = Effect.map(parts, make)
export type Library = ReturnType<typeof make>
