// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The private key a seal is made with: read from the operator's file, or made once in a directory
 * of our own, with the record to publish beside it (RFC 6376 section 3.6.1). Touches these files.
 */
import { createPrivateKey, createPublicKey, generateKeyPair, randomUUID } from "node:crypto"
import type { KeyObject } from "node:crypto"
import { link, open, readFile, rm, stat, writeFile } from "node:fs/promises"
import { join } from "node:path"
import { promisify } from "node:util"
import * as Effect from "effect/Effect"
import { SealError } from "../src/services/MailAuth.ts"
import * as Directories from "./Directories.ts"

/** Octets of a key file; an RSA key of 8,192 bits takes 6,500. */
const maxFile = 64 * 1024
/** RFC 8301 section 3.2: at least 1,024 bits, 2,048 advised; more costs time at every hop. */
const newBits = 2048
const minBits = 1024

export interface Naming {
  readonly domain: string
  readonly selector: string
}

const fail = (detail: string, cause?: unknown): SealError =>
  new SealError({ reason: "key", detail, cause })

const codeOf = (cause: unknown): string | undefined =>
  (cause as { readonly code?: string } | undefined)?.code

const reading =
  (file: string) =>
  (cause: unknown): SealError =>
    fail(`${file}: ${codeOf(cause) ?? "not readable"}`, cause)

const isUsable = ({ asymmetricKeyDetails, asymmetricKeyType }: KeyObject): boolean =>
  asymmetricKeyType === "ed25519" ||
  (asymmetricKeyType === "rsa" && (asymmetricKeyDetails?.modulusLength ?? 0) >= minBits)

/** Reads a key that others may not read, and checks that it can sign. */
const read = Effect.fnUntraced(function* (file: string) {
  const found = yield* Effect.tryPromise({ try: () => stat(file), catch: reading(file) })
  if ((found.mode & 0o007) !== 0) return yield* fail(`${file}: every user can read it`)
  if (found.size > maxFile) return yield* fail(`${file}: too large for a key`)
  const pem = yield* Effect.tryPromise({
    try: () => readFile(file, "latin1"),
    catch: reading(file)
  })
  const key = yield* Effect.try({
    try: () => createPrivateKey(pem),
    catch: (cause) => fail(`${file}: no private key in PEM`, cause)
  })
  if (!isUsable(key)) return yield* fail(`${file}: not RSA of ${minBits} bits, nor Ed25519`)
  return pem
})

/** A line for a zone file; strings of 255 octets at most (RFC 1035 section 3.3.14). */
export const record = (key: KeyObject, { domain, selector }: Naming): string => {
  const type = key.asymmetricKeyType === "ed25519" ? "ed25519" : "rsa"
  const der = createPublicKey(key).export({ type: "spki", format: "der" })
  // RFC 8463 section 4 publishes the bare 32 octets of an Ed25519 key.
  const octets = type === "ed25519" ? der.subarray(-32) : der
  const text = `v=DKIM1; k=${type}; p=${octets.toString("base64")}`
  const strings = text.match(/.{1,255}/g) ?? []
  const quoted = strings.map((string) => `"${string}"`).join(" ")
  return `${selector}._domainkey.${domain}. IN TXT ( ${quoted} )\n`
}

const generate = promisify(generateKeyPair)

const writing =
  (file: string) =>
  (cause: unknown): SealError =>
    fail(`${file}: ${codeOf(cause) ?? "not writable"}`, cause)

const newKey = Effect.map(
  Effect.promise(() => generate("rsa", { modulusLength: newBits })),
  ({ privateKey }) => privateKey.export({ type: "pkcs8", format: "pem" }).toString()
)

/**
 * Puts a new key under its name or leaves the one that is there: of two processes that begin at
 * once, one wins and both use its key. Making a key takes long: first comes what may fail.
 */
const create = (file: string): Effect.Effect<void, SealError> => {
  const draft = `${file}.${randomUUID()}`
  const write = Effect.acquireUseRelease(
    Effect.tryPromise({ try: () => open(draft, "wx", 0o600), catch: writing(file) }),
    Effect.fnUntraced(function* (handle) {
      const text = yield* newKey
      yield* Effect.tryPromise({
        try: () => handle.writeFile(text).then(() => handle.sync()),
        catch: writing(file)
      })
    }),
    (handle) => Effect.promise(() => handle.close())
  )
  const name = Effect.tryPromise({ try: () => link(draft, file), catch: writing(file) }).pipe(
    Effect.catchIf(
      (error) => codeOf(error.cause) === "EEXIST",
      () => Effect.void
    )
  )
  return write.pipe(
    Effect.andThen(name),
    Effect.ensuring(Effect.promise(() => rm(draft, { force: true })))
  )
}

/** The key of our own for a name, made at its first use. */
const own = Effect.fnUntraced(function* (directory: string, naming: Naming) {
  const file = join(directory, `${naming.selector}._domainkey.${naming.domain}.pem`)
  // A key that is there and cannot be used is not ours to replace: its record may be published.
  const there = yield* read(file).pipe(
    Effect.catchIf(
      (error) => codeOf(error.cause) === "ENOENT",
      () => Effect.undefined
    )
  )
  if (there !== undefined) return there
  yield* Effect.try({
    try: () => Directories.make(directory, 0o700),
    catch: writing(directory)
  })
  yield* create(file)
  const pem = yield* read(file)
  const text = record(createPrivateKey(pem), naming)
  yield* Effect.tryPromise({ try: () => writeFile(`${file}.txt`, text), catch: writing(file) })
  return pem
})

/**
 * Reads keys and keeps them for the life of the layer; a failure is not kept, so a file that is put
 * right works with the next message.
 */
export const make = (directory: string) => {
  const kept = new Map<string, string>()
  return Effect.fnUntraced(function* (keyFile: string | undefined, naming: Naming) {
    const place = keyFile ?? `${naming.selector}._domainkey.${naming.domain}`
    const known = kept.get(place)
    if (known !== undefined) return known
    const pem = yield* keyFile === undefined ? own(directory, naming) : read(keyFile)
    kept.set(place, pem)
    return pem
  })
}
