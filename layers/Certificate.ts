// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The certificate and key we offer with STARTTLS: from files an operator names, or made by
 * ourselves once and kept. A certificate nobody signed still keeps mail from being read on the
 * way; other servers do not check it (RFC 7672 section 1.3).
 */
import * as crypto from "node:crypto"
import * as fs from "node:fs/promises"
import * as path from "node:path"
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"

/** In PEM; `cert` may be a chain, our own certificate first. */
export interface Certificate {
  readonly cert: string
  readonly key: string
}

/** Where they are. */
export interface Files {
  readonly cert: string
  readonly key: string
}

/** There is no certificate to use. */
export class CertificateError extends Schema.TaggedError<CertificateError>()("CertificateError", {
  reason: Schema.Literals([
    "cannot be read",
    "cannot be written",
    "no certificate",
    "no private key",
    "key of another certificate"
  ]),
  file: Schema.String,
  cause: Schema.Defect()
}) {
  override get message(): string {
    return `${this.file}: ${this.reason}`
  }
}

/** Loads the files an operator names. Every fault names its file. */
export const load = Effect.fn("Certificate.load")(function* (files: Files) {
  const cert = yield* read(files.cert)
  const key = yield* read(files.key)
  yield* check({ cert, key }, files)
  return { cert, key } satisfies Certificate
})

/** Ten years: it protects no name, so there is nothing to renew it for. */
const validFor = Duration.days(3650)

/**
 * The certificate of this installation, made for `hostname` when there is none yet. Both live in
 * one file, so that no crash and no second process can part them.
 */
export const selfSigned = Effect.fn("Certificate.selfSigned")(function* (settings: {
  readonly directory: string
  readonly hostname: string
}) {
  const file = path.join(settings.directory, "tls.pem")
  const kept = yield* read(file).pipe(Effect.catchIf(isAbsent, () => make(file, settings.hostname)))
  const pair = { cert: blocks(kept, "CERTIFICATE"), key: blocks(kept, "PRIVATE KEY") }
  yield* check(pair, { cert: file, key: file })
  return pair satisfies Certificate
})

const isAbsent = ({ cause }: CertificateError): boolean =>
  (cause as NodeJS.ErrnoException).code === "ENOENT"

const blocks = (text: string, label: string): string => {
  const block = new RegExp(`-----BEGIN ${label}-----[^-]*-----END ${label}-----\\n?`, "g")
  return [...text.matchAll(block)].join("")
}

const attempt = <A>(reason: CertificateError["reason"], file: string, act: () => A | Promise<A>) =>
  Effect.tryPromise({
    try: () => Promise.resolve().then(act),
    catch: (cause) => new CertificateError({ reason, file, cause })
  })

const read = (file: string) => attempt("cannot be read", file, () => fs.readFile(file, "utf8"))

const check = Effect.fnUntraced(function* (pair: Certificate, files: Files) {
  const { cert, key } = files
  const own = yield* attempt("no certificate", cert, () => new crypto.X509Certificate(pair.cert))
  const secret = yield* attempt("no private key", key, () => crypto.createPrivateKey(pair.key))
  if (own.checkPrivateKey(secret)) return
  return yield* new CertificateError({
    reason: "key of another certificate",
    file: key,
    cause: cert
  })
})

/** Makes the file; whichever of two processes comes first makes it for both. */
const make = Effect.fnUntraced(function* (file: string, hostname: string) {
  const pem = yield* attempt("cannot be written", file, yield* generate(hostname))
  yield* attempt("cannot be written", file, () => keep(file, pem))
  return yield* read(file)
})

const generate = Effect.fnUntraced(function* (hostname: string) {
  const now = yield* Clock.currentTimeMillis
  return (): string => {
    const curve = { namedCurve: "P-256" }
    const { privateKey, publicKey } = crypto.generateKeyPairSync("ec", curve)
    const name = sequence(der(0x31, sequence(oid.commonName, der(0x0c, hostname.slice(0, 64)))))
    // RFC 5280 section 4.1, the fields in their order.
    const fields = sequence(
      der(0xa0, der(0x02, Buffer.from([2]))), // version 3
      der(0x02, Buffer.from([1]), crypto.randomBytes(15)), // a positive number of at most 20 octets
      sequence(oid.ecdsaWithSha256),
      name,
      sequence(time(now), time(now + Duration.toMillis(validFor))),
      name,
      publicKey.export({ type: "spki", format: "der" }),
      der(0xa3, sequence(sequence(oid.subjectAltName, der(0x04, sequence(der(0x82, hostname))))))
    )
    const signature = der(0x03, Buffer.from([0]), crypto.sign("sha256", fields, privateKey))
    const cert = sequence(fields, sequence(oid.ecdsaWithSha256), signature)
    return `${privateKey.export({ type: "pkcs8", format: "pem" })}${pem("CERTIFICATE", cert)}`
  }
})

/** A value as X.690 section 8.1 writes it: tag, length (below 64 KiB), contents. */
const der = (tag: number, ...parts: ReadonlyArray<Buffer | string>): Buffer => {
  const contents = Buffer.concat(parts.map((part) => Buffer.from(part)))
  const { length } = contents
  const lengthOctets = length < 128 ? [length] : [0x82, length >> 8, length & 255]
  return Buffer.concat([Buffer.from([tag, ...lengthOctets]), contents])
}

const sequence = (...parts: ReadonlyArray<Buffer>): Buffer => der(0x30, ...parts)

const oid = {
  commonName: Buffer.from("0603550403", "hex"),
  subjectAltName: Buffer.from("0603551d11", "hex"),
  ecdsaWithSha256: Buffer.from("06082a8648ce3d040302", "hex")
}

/** RFC 5280 section 4.1.2.5: two digits of the year until 2049, four afterwards. */
const time = (millis: number): Buffer => {
  const digits = `${new Date(millis).toISOString().replace(/\.\d+|[-:T]/g, "")}`
  return digits < "2050" ? der(0x17, digits.slice(2)) : der(0x18, digits)
}

/** RFC 7468. */
const pem = (label: string, octets: Buffer): string => {
  const lines = octets.toString("base64").replace(/.{64}(?=.)/g, "$&\n")
  return `-----BEGIN ${label}-----\n${lines}\n-----END ${label}-----\n`
}

/** On disk whole or not at all; a file that is there already stays. */
const keep = async (file: string, pem: string): Promise<void> => {
  const draft = `${file}.${crypto.randomBytes(6).toString("hex")}`
  const handle = await fs.open(draft, "wx", 0o600)
  await handle
    .writeFile(pem)
    .then(() => handle.sync())
    .finally(() => handle.close())
  await fs
    .link(draft, file)
    .catch(wasThere)
    .finally(() => fs.unlink(draft))
}

const wasThere = (cause: NodeJS.ErrnoException): void | Promise<never> =>
  cause.code === "EEXIST" ? undefined : Promise.reject(cause)
