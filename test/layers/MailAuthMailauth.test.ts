// SPDX-License-Identifier: AGPL-3.0-or-later
import { mkdtempSync } from "node:fs"
import { chmod, readFile, readdir, rm, stat, writeFile } from "node:fs/promises"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { afterAll } from "vitest"
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import { MailAuthMailauth } from "../../layers/MailAuthMailauth.ts"
import * as Header from "../../src/mail/Header.ts"
import type { Auth } from "../../src/pipeline/State.ts"
import { Dns } from "../../src/services/Dns.ts"
import { MailAuth } from "../../src/services/MailAuth.ts"
import type { Arrival, Limits, Seal } from "../../src/services/MailAuth.ts"
import * as DnsZone from "../support/DnsZone.ts"
import * as Mails from "../support/Mails.ts"
import arcSign from "../vectors/arc/sign.json" with { type: "json" }
import arcValidate from "../vectors/arc/validate.json" with { type: "json" }
import dkimVectors from "../vectors/dkim/cases.json" with { type: "json" }
import treewalk from "../vectors/dmarc/treewalk.json" with { type: "json" }
import fromCases from "../vectors/from/cases.json" with { type: "json" }
import spfSuite from "../vectors/spf/rfc7208.json" with { type: "json" }

const keyDirectory = mkdtempSync(join(tmpdir(), "pepsi-seal-"))
afterAll(() => rm(keyDirectory, { recursive: true, force: true }))

const limits: Limits = {
  lookup: Duration.seconds(5),
  total: Duration.seconds(20),
  signatures: 10,
  minRsaBits: 1024
}

const over = (zone: DnsZone.Zone, asked?: Array<DnsZone.Question>) =>
  MailAuthMailauth({
    hostname: "mx.ours.example",
    keyDirectory
  }).pipe(Layer.provide(DnsZone.memory(zone, asked)))

const text = (from: string, rest = ""): string =>
  `From: ${from}\nTo: b@ours.example\nSubject: s\nDate: Mon, 30 Nov 2026 10:00:00 +0000\n` +
  `Message-ID: <1@a.example>\n${rest}\nHello.\n`

type Named<A> = { readonly [name: string]: A }

interface Asked extends Partial<Omit<Arrival, "header" | "body">> {
  readonly zone?: DnsZone.Zone
  readonly asked?: Array<DnsZone.Question>
  readonly limits?: Partial<Limits>
}

type Given = string | Buffer | Mails.Message

const verify = (message: Given, { asked, zone = {}, ...rest }: Asked = {}) => {
  const isWhole = typeof message === "string" || Buffer.isBuffer(message)
  const { body, header } = isWhole ? Mails.message(message) : message
  return MailAuth.use((mailAuth) =>
    mailAuth.verify(
      { client: undefined, sender: "", ...rest, header, body },
      { ...limits, ...rest.limits }
    )
  ).pipe(Effect.provide(over(zone, asked)))
}

const authOf = (message: string | Buffer | Mails.Message, asked?: Asked): Effect.Effect<Auth> =>
  Effect.map(verify(message, asked), ({ auth }) => auth)

const reject = (domain: string): DnsZone.Zone => ({
  [`_dmarc.${domain}`]: { TXT: ["v=DMARC1; p=reject"] }
})
const key = (domain: string): DnsZone.Zone => ({
  [`s._domainkey.${domain}`]: { TXT: [Mails.keyRecord] }
})
const client = { ip: "192.0.2.1", helo: "out.a.example" }

describe("SPF, the suite of RFC 7208", () => {
  interface Spf {
    readonly helo: string
    readonly host: string
    readonly mailfrom: string
    readonly result: string | ReadonlyArray<string>
  }
  type Entry = string | { readonly [type: string]: string | ReadonlyArray<string | number> }
  /** What a name has: a record of the old type SPF stands for a TXT unless the suite gives one. */
  const records = (entries: ReadonlyArray<Entry>): DnsZone.Records | DnsZone.Trouble => {
    const found: { [type: string]: Array<string | ReadonlyArray<string>> } = {}
    const hasTxt = entries.some((entry) => typeof entry !== "string" && "TXT" in entry)
    for (const entry of entries) {
      if (typeof entry === "string") continue
      const [type, value] = Object.entries(entry)[0]!
      if (value === "NONE" || (type === "SPF" && hasTxt)) continue
      const record =
        type === "MX" ? (value as ReadonlyArray<string | number>).join(" ") : (value as string)
      ;(found[type === "SPF" ? "TXT" : type] ??= []).push(record)
    }
    return entries.includes("TIMEOUT") && found["TXT"] === undefined ? "SERVFAIL" : found
  }
  // They look up names with a colon or a percent sign, which c-ares does not send.
  const unsendable = ["a-colon-domain", "mx-colon-domain", "macro-mania-in-domain"]
  for (const { description, tests, zonedata } of spfSuite) {
    const zone = Object.fromEntries(
      Object.entries(zonedata).map(([name, entries]) => [
        name.toLowerCase().replace(/\.$/, ""),
        records(entries as unknown as ReadonlyArray<Entry>)
      ])
    )
    it.effect(description, () =>
      Effect.gen(function* () {
        for (const [name, test] of Object.entries(tests as unknown as Named<Spf>)) {
          const auth = yield* authOf(text("a@none.example"), {
            client: { ip: test.host, helo: test.helo },
            sender: test.mailfrom,
            zone
          })
          const right = unsendable.includes(name.replace("-ip4mapped", ""))
            ? "permerror"
            : test.result
          assert.include([right].flat(), auth.spf, name)
        }
      })
    )
  }
})

describe("DKIM, the corner cases", () => {
  type Value = string | ReadonlyArray<string> | { readonly chunks: ReadonlyArray<string> }
  const records = Object.entries(dkimVectors.zone as Named<Value>)
  const zone = Object.fromEntries(
    records.map(([name, value]) => {
      if (value === "!SERVFAIL") return [name, "SERVFAIL" as const]
      if (value === "!TIMEOUT") return [name, "TIMEOUT" as const]
      const texts = typeof value === "string" ? [value] : "chunks" in value ? [value.chunks] : value
      return [name, { TXT: texts }]
    })
  )
  for (const { expect, id, message, why } of dkimVectors.cases) {
    it.live(`${id}: ${why}`, () =>
      Effect.gen(function* () {
        const auth = yield* authOf(message, { zone, limits: { lookup: Duration.millis(20) } })
        const results = auth.dkim.map(({ result }) => result)
        switch (expect) {
          case "pass":
            return assert.include(results, "pass")
          case "temperror":
            return assert.deepStrictEqual(results, ["temperror"])
          case "none":
            return assert.deepStrictEqual(results, [])
          case "pass-but-unsafe":
            assert.deepStrictEqual(
              auth.dkim.map((one) => [one.result, one.reason]),
              [["pass", "unsigned tail"]]
            )
            return assert.isFalse(auth.aligned)
          case "any":
            return assert.isNotEmpty(results)
          default:
            return assert.notInclude(results, "pass")
        }
      })
    )
  }

  it.effect("a signature field of 200 KB is not looked at", () =>
    Effect.gen(function* () {
      const asked: Array<DnsZone.Question> = []
      const huge =
        "DKIM-Signature: v=1; a=rsa-sha256; d=a.example; s=s; h=from; bh=x; b=" +
        `${"A ".repeat(100_000)}\n`
      const auth = yield* authOf(huge + text("u@a.example"), { asked })
      assert.deepStrictEqual(
        auth.dkim.map((one) => [one.d, one.result, one.reason]),
        [["a.example", "permerror", "too long"]]
      )
      assert.notInclude(
        asked.map(({ name }) => name),
        "s._domainkey.a.example"
      )
    })
  )

  it.effect("a signature that is not looked at leaves the others their results", () =>
    Effect.gen(function* () {
      const good = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "a.example" })
      )
      const fields = ["z=a" + " ".repeat(200) + "b", "z=" + "x".repeat(9_000)].map(
        (z) => `DKIM-Signature: v=1; a=rsa-sha256; d=b.example; s=s; h=from; bh=x; b=x; ${z}\r\n`
      )
      const signed = Buffer.concat([Buffer.from(fields.join("")), good])
      const auth = yield* authOf(signed, { zone: key("a.example") })
      assert.deepStrictEqual(
        auth.dkim.map((one) => [one.d, one.result, one.reason]),
        [
          ["b.example", "permerror", "too many blanks"],
          ["b.example", "permerror", "too long"],
          ["a.example", "pass", undefined]
        ]
      )
      assert.isTrue(auth.aligned)
    })
  )

  it.effect("of a thousand signatures ten are looked at (M2)", () =>
    Effect.gen(function* () {
      const asked: Array<DnsZone.Question> = []
      const flood = Array.from(
        { length: 1000 },
        (_, i) =>
          `DKIM-Signature: v=1; a=rsa-sha256; d=d${i}.example; s=s; h=from; bh=AAAA; b=AAAA\n`
      ).join("")
      const auth = yield* authOf(flood + text("u@a.example"), { asked })
      assert.lengthOf(auth.dkim, 10)
      assert.isAtMost(asked.length, 20)
    })
  )
})

describe("ARC, the suite of ValiMail", () => {
  const zoneOf = (txt: { readonly [name: string]: string | undefined }): DnsZone.Zone =>
    Object.fromEntries(
      Object.entries(txt).map(([name, value]) => [
        name,
        { TXT: [(value ?? "").replace(/\n/g, "")] }
      ])
    )
  // RFC 8617 section 4.1.2 and RFC 6376 section 3.5 are against the suite in these.
  const disputed = ["ams_fields_h_empty", "ams_fields_c_na"]
  interface Validation {
    readonly cv: string
    readonly message: string
  }
  for (const { description, tests, txt } of arcValidate) {
    it.effect(`validates: ${description}`, () =>
      Effect.gen(function* () {
        for (const [name, test] of Object.entries(tests as unknown as Named<Validation>)) {
          const { arc } = yield* authOf(test.message, { zone: zoneOf(txt as never) })
          const right =
            test.cv === "" || test.cv === null ? ["none", "fail"] : [test.cv.toLowerCase()]
          if (!disputed.includes(name)) assert.include(right, arc, name)
        }
      })
    )
  }

  interface Signing {
    readonly message: string
    readonly AS: string
  }
  for (const { description, domain, privatekey, sel, tests, txt } of arcSign) {
    it.effect(`seals: ${description}`, () =>
      Effect.gen(function* () {
        const zone = zoneOf(txt as never)
        const keyFile = join(keyDirectory, "suite.pem")
        yield* Effect.promise(() => writeFile(keyFile, privatekey, { mode: 0o600 }))
        for (const [name, test] of Object.entries(tests as unknown as Named<Signing>)) {
          const message = Mails.message(test.message)
          const { auth, bodyHash } = yield* verify(message, { zone })
          const sealing = {
            ...message,
            auth,
            authservId: "lists.example.org",
            domain,
            selector: sel,
            keyFile
          }
          const layer = over(zone)
          const inOnePass = yield* MailAuth.use((it) => it.seal({ ...sealing, bodyHash })).pipe(
            Effect.provide(layer)
          )
          const later = yield* MailAuth.use((it) =>
            it.seal({ ...sealing, bodyHash: undefined })
          ).pipe(Effect.provide(layer))
          assert.deepStrictEqual(inOnePass, later, name)
          if (test.AS === "") {
            assert.isUndefined(inOnePass, name)
            continue
          }
          assert.strictEqual(inOnePass!.instance, Number(/i=(\d+)/.exec(test.AS)![1]), name)
          const again = yield* authOf(
            { header: Header.prepend(message.header, inOnePass!.fields), body: message.body },
            { zone }
          )
          assert.strictEqual(
            again.arc,
            /cv=(\w+)/.exec(test.AS)![1] === "fail" ? "fail" : "pass",
            name
          )
        }
      })
    )
  }
})

describe("DMARC, the tree walk of RFC 9989", () => {
  interface Walk {
    readonly id: string
    readonly from: string
    readonly zone: { readonly [name: string]: string | ReadonlyArray<string> }
    readonly exists?: ReadonlyArray<string>
    readonly dkim?: ReadonlyArray<string>
    readonly spf?: ReadonlyArray<string>
    readonly want: {
      readonly policy?: string | null
      readonly result?: string
      readonly org?: string
    }
  }
  // The compiler makes a type of its own for each entry of a file of vectors; this is what they share.
  const walks = treewalk as unknown as ReadonlyArray<Walk>
  for (const { dkim = [], exists, from, id, spf = [], want, zone: texts } of walks) {
    it.effect(id, () =>
      Effect.gen(function* () {
        let message = Mails.octets(text(`u@${Buffer.from(from).toString("latin1")}`))
        for (const domain of dkim) {
          const signed = message
          message = yield* Effect.promise(() => Mails.sign(signed, { domain }))
        }
        const zone: { [name: string]: DnsZone.Records | DnsZone.Trouble } = {}
        for (const [name, value] of Object.entries(texts)) {
          zone[name] = typeof value === "string" ? (value as DnsZone.Trouble) : { TXT: value }
        }
        for (const name of exists ?? [from]) zone[name] ??= { A: ["192.0.2.9"] }
        for (const domain of dkim) Object.assign(zone, key(domain))
        for (const domain of spf) zone[domain] = { TXT: ["v=spf1 ip4:192.0.2.1 -all"] }
        const auth = yield* authOf(message, {
          zone,
          client,
          sender: spf[0] === undefined ? "" : `u@${spf[0]}`
        })
        if (want.policy !== undefined) assert.strictEqual(auth.dmarc_policy, want.policy)
        if (want.result !== undefined) assert.strictEqual(auth.dmarc, want.result)
        if (want.org !== undefined) assert.strictEqual(auth.dmarc_domain, want.org)
      })
    )
  }
})

describe("hostile From fields", () => {
  for (const { authors, id, message, why } of fromCases) {
    it.effect(`${id}: ${why}`, () =>
      Effect.gen(function* () {
        const zone = {
          ...reject("bank.example"),
          ...reject("evil.example"),
          ...key("bank.example"),
          ...key("evil.example")
        }
        // The sender signs for evil.example, as he may.
        const signed = yield* Effect.promise(() =>
          Mails.sign(message.includes("\r\n") ? Buffer.from(message, "latin1") : message, {
            domain: "evil.example"
          })
        )
        const auth = yield* authOf(signed, { zone })
        const domains = new Set(authors.map((author) => author.slice(author.lastIndexOf("@") + 1)))
        if (auth.dmarc === "pass") {
          assert.deepStrictEqual([...domains], ["evil.example"])
          assert.strictEqual(auth.from_domain, "evil.example")
        }
        if (domains.size !== 1)
          assert.deepStrictEqual(
            [auth.dmarc, auth.from_domain, auth.aligned],
            ["permerror", null, false]
          )
      })
    )
  }
})

describe("what users reported", () => {
  it.effect("R16: %{d} in an included record is the domain of that record", () =>
    Effect.gen(function* () {
      const auth = yield* authOf(text("u@a.example"), {
        client,
        sender: "u@a.example",
        zone: {
          "a.example": { TXT: ["v=spf1 include:b.example -all"] },
          "b.example": { TXT: ["v=spf1 include:%{d}.x.example -all"] },
          "b.example.x.example": { TXT: ["v=spf1 ip4:192.0.2.1 -all"] }
        }
      })
      assert.deepStrictEqual(
        [auth.spf, auth.spf_domain, auth.spf_identity],
        ["pass", "a.example", "mailfrom"]
      )
    })
  )

  it.effect("R19: no answer for a key is no failure of DMARC, and the next try passes", () =>
    Effect.gen(function* () {
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "a.example" })
      )
      for (const trouble of ["SERVFAIL", "REFUSED"] as const) {
        const zone = { ...reject("a.example"), "s._domainkey.a.example": trouble }
        const auth = yield* authOf(signed, { client, sender: "u@other.example", zone })
        assert.deepStrictEqual(
          auth.dkim.map(({ result }) => result),
          ["temperror"]
        )
        assert.strictEqual(auth.dmarc, "temperror")
      }
      const well = yield* authOf(signed, {
        client,
        sender: "u@other.example",
        zone: { ...reject("a.example"), ...key("a.example") }
      })
      assert.deepStrictEqual(
        [well.dmarc, well.dmarc_policy, well.aligned],
        ["pass", "reject", true]
      )
    })
  )

  it.effect("R19: no answer for a key that could not align anyway is a failure", () =>
    Effect.gen(function* () {
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "evil.example" })
      )
      const auth = yield* authOf(signed, {
        zone: { ...reject("a.example"), "s._domainkey.evil.example": "SERVFAIL" }
      })
      assert.deepStrictEqual(
        [auth.dkim[0]!.result, auth.dmarc, auth.dmarc_policy],
        ["temperror", "fail", "reject"]
      )
    })
  )

  it.effect("no answer for an aligned SPF is no failure of DMARC (RFC 7208 section 8.6)", () =>
    Effect.gen(function* () {
      const auth = yield* authOf(text("u@a.example"), {
        client,
        sender: "u@a.example",
        zone: { ...reject("a.example"), "a.example": "SERVFAIL" }
      })
      assert.deepStrictEqual([auth.spf, auth.dmarc], ["temperror", "temperror"])
    })
  )

  const signedForA = Effect.promise(() => Mails.sign(text("u@a.example"), { domain: "a.example" }))
  const both = { ...reject("a.example"), ...reject("bank.example"), ...key("a.example") }
  const onTop = (field: string) =>
    Effect.map(signedForA, (signed) => Buffer.concat([Buffer.from(`${field}\r\n`), signed]))
  const cases: ReadonlyArray<readonly [string, Effect.Effect<string | Buffer>]> = [
    ["R22a: a second From on top of a valid signature", onTop("From: ceo@bank.example")],
    ["R22b: one From of two domains", Effect.succeed(text("u@a.example, v@evil.example"))],
    ["R22c: the same From twice in another case", onTop("FROM: U@A.EXAMPLE")],
    ["R22d: no From", Effect.succeed("To: b@ours.example\nSubject: s\n\nHello.\n")],
    ["R22f: a second From hidden by a blank before its colon", onTop("From : ceo@bank.example")]
  ]
  for (const [name, message] of cases) {
    it.effect(`${name} is not let through`, () =>
      Effect.gen(function* () {
        const auth = yield* authOf(yield* message, { zone: both })
        assert.deepStrictEqual(
          [auth.dmarc, auth.from_domain, auth.aligned],
          ["permerror", null, false]
        )
        assert.isFalse(auth.dkim.some(({ aligned }) => aligned))
      })
    )
  }
  it.effect("R22e: a blank before the colon of the only From hides nothing", () =>
    Effect.gen(function* () {
      const auth = yield* authOf(text("u@bank.example").replace("From:", "From :"), { zone: both })
      assert.deepStrictEqual(
        [auth.dmarc, auth.dmarc_policy, auth.from_domain],
        ["fail", "reject", "bank.example"]
      )
    })
  )

  it.effect("text behind l= speaks for nobody", () =>
    Effect.gen(function* () {
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "a.example", maxBodyLength: 4 })
      )
      const auth = yield* authOf(Buffer.concat([signed, Buffer.from("Buy!\r\n")]), { zone: both })
      assert.deepStrictEqual(
        [auth.dkim[0]!.result, auth.dkim[0]!.aligned, auth.dmarc],
        ["pass", false, "fail"]
      )
    })
  )
})

describe("bounds", () => {
  it.effect("a line of 5 MB is not canonicalised (M1)", () =>
    Effect.gen(function* () {
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "a.example" })
      )
      const message = Buffer.concat([signed, Buffer.alloc(5_000_000, "x"), Buffer.from("\r\n")])
      const begun = performance.now()
      const found = yield* verify(message, {
        zone: { ...reject("a.example"), ...key("a.example") }
      })
      assert.isBelow(performance.now() - begun, 500)
      assert.deepStrictEqual(
        found.auth.dkim.map((one) => [one.d, one.result, one.reason]),
        [["a.example", "permerror", "line too long"]]
      )
      assert.strictEqual(found.auth.dmarc, "fail")
      assert.isUndefined(found.bodyHash)
    })
  )

  it.effect("20 MB of ordinary lines pass", () =>
    Effect.gen(function* () {
      const body = Buffer.from("0123456789".repeat(7).concat("\r\n").repeat(290_000))
      const signed = yield* Effect.promise(() =>
        Mails.sign(Buffer.concat([Mails.octets(text("u@a.example")), body]), {
          domain: "a.example"
        })
      )
      const auth = yield* authOf(signed, { zone: key("a.example") })
      assert.deepStrictEqual(
        auth.dkim.map(({ result }) => result),
        ["pass"]
      )
    })
  )

  /** How often other work had its turn until an effect was done. */
  const turnsDuring = <A, E, R>(effect: Effect.Effect<A, E, R>) =>
    Effect.gen(function* () {
      let turns = 0
      let isDone = false
      const turn = (): void => {
        turns++
        if (!isDone) setImmediate(turn)
      }
      setImmediate(turn)
      const found = yield* effect
      isDone = true
      return [found, turns] as const
    })
  const ways = (count: number): string =>
    Array.from(
      { length: count },
      (_, i) =>
        "DKIM-Signature: v=1; a=rsa-sha256; c=relaxed/relaxed; " +
        `d=d${i}.example; s=s; h=from; bh=AAAA; b=AAAA; l=${i}\n`
    ).join("")

  it.effect("a body of a million blank lines does not stop the other mail", () =>
    Effect.gen(function* () {
      const message = Mails.message(ways(10) + text("u@a.example", "\n" + " \n".repeat(1_000_000)))
      const [auth, turns] = yield* turnsDuring(authOf(message))
      assert.isAbove(turns, 100)
      assert.deepStrictEqual(
        auth.dkim.map(({ reason }) => reason),
        [
          ...Array.from({ length: 2 }, () => "body hash did not verify"),
          ...Array.from({ length: 8 }, () => "too many body hashes")
        ]
      )
    })
  )

  it.effect("a body that a seal hashes does not stop the other mail", () =>
    Effect.gen(function* () {
      const mailAuth = yield* MailAuth
      const small = Mails.message(text("u@a.example"))
      const large = Mails.message(text("u@a.example", "\n" + " \n".repeat(500_000)))
      const auth = yield* authOf(small)
      const key = { domain: "ours.example", selector: "turns", keyFile: undefined }
      const seal = (message: Mails.Message) =>
        mailAuth.seal({ ...message, ...key, auth, authservId: "a", bodyHash: undefined })
      yield* seal(small) // so that waiting for the key gives no turns
      const [sealed, turns] = yield* turnsDuring(seal(large))
      assert.strictEqual(sealed?.instance, 1)
      assert.isAbove(turns, 50)
    }).pipe(Effect.provide(over({})))
  )

  it.effect("a body of too many lines is not canonicalised, and not sealed", () =>
    Effect.gen(function* () {
      const message = Mails.message(ways(1) + text("u@a.example", "\n" + " \n".repeat(1_500_001)))
      const { auth, bodyHash } = yield* verify(message)
      assert.deepStrictEqual(
        auth.dkim.map((one) => [one.result, one.reason]),
        [["permerror", "too many lines"]]
      )
      assert.isUndefined(bodyHash)
    })
  )

  it.effect("signatures that hash the body in the same way are all looked at", () =>
    Effect.gen(function* () {
      let signed = Mails.octets(text("u@a.example"))
      for (const maxBodyLength of [5, 4, undefined, 4, 5, undefined]) {
        const input = signed
        const limit = maxBodyLength === undefined ? {} : { maxBodyLength }
        signed = yield* Effect.promise(() => Mails.sign(input, { domain: "a.example", ...limit }))
      }
      const auth = yield* authOf(signed, { zone: key("a.example") })
      assert.deepStrictEqual(
        auth.dkim.map(({ result }) => result),
        ["pass", "pass", "pass", "pass", "pass", "pass"]
      )
    })
  )

  it.effect("a body of more than 50 MiB is hashed in one way for all signatures", () =>
    Effect.gen(function* () {
      const { header } = Mails.message(ways(2) + text("u@a.example"))
      const line = "0123456789".repeat(7).concat("\r\n")
      const body = Buffer.alloc(728_178 * line.length, line)
      const auth = yield* authOf({ header, body })
      assert.deepStrictEqual(
        auth.dkim.map(({ reason }) => reason),
        ["body hash did not verify", "too many body hashes"]
      )
    })
  )

  it.effect("a sender's slow name servers cannot keep DMARC from its answer", () =>
    Effect.gen(function* () {
      const includes = Array.from({ length: 9 }, (_, i) => [
        `i${i}.evil.example`,
        { TXT: [`v=spf1 include:i${i + 1}.evil.example -all`] }
      ])
      const zone = {
        ...Object.fromEntries(includes),
        "_dmarc.bank.example": { TXT: ["v=DMARC1; p=none; np=reject"] }
      }
      // Every answer under evil.example takes 4 of the 5 s that a look-up may take.
      const slow = Layer.effect(
        Dns,
        Effect.map(Dns, ({ resolve }) =>
          Dns.of({
            resolve: (name, type) =>
              Effect.delay(resolve(name, type), name.endsWith("evil.example") ? "4 seconds" : 0)
          })
        )
      ).pipe(Layer.provide(DnsZone.memory(zone)))
      const arrival = {
        client,
        sender: "u@i0.evil.example",
        ...Mails.message(text("ceo@nx.bank.example"))
      }
      const layer = MailAuthMailauth({
        hostname: "mx.ours.example",
        keyDirectory
      }).pipe(Layer.provide(slow))
      yield* authOf(text("u@a.example")) // so that loading the library takes none of the time
      const [{ auth }, seconds] = yield* Mails.elapse(
        MailAuth.use((mailAuth) => mailAuth.verify(arrival, limits)).pipe(Effect.provide(layer))
      )
      assert.isAtMost(seconds, 20)
      assert.deepStrictEqual(
        [auth.spf, auth.dmarc, auth.dmarc_policy],
        ["temperror", "fail", "reject"]
      )
    })
  )

  const quick = (name: string, message: () => string) =>
    it.effect(`${name} takes no time`, () =>
      Effect.gen(function* () {
        const made = Mails.message(message().replace(/\n/g, "\r\n"))
        const begun = performance.now()
        const auth = yield* authOf(made, { zone: key("a.example") })
        assert.isBelow(performance.now() - begun, 1_000)
        assert.isFalse(auth.aligned)
      })
    )
  const signature =
    "DKIM-Signature: v=1; a=rsa-sha256; c=relaxed/relaxed; d=a.example; s=s; " +
    "bh=AAAA; b=AAAA; h=from"
  quick("a field of 250,000 lines", () => text("u@a.example", "X: x\n" + " x\n".repeat(250_000)))
  quick("100,000 fields", () => text("u@a.example", "a:b\n".repeat(100_000)))
  quick(
    "a list of 30,000 signed names",
    () => `${signature}${":z".repeat(30_000)}\n` + text("u@a.example", "a:b\n".repeat(9_000))
  )
  quick(
    "ten lists of 900 signed names",
    () =>
      `${signature}${":z".repeat(900)}\n`.repeat(10) + text("u@a.example", "a:b\n".repeat(9_000))
  )
  quick("a From of 200 KB", () => text("a,".repeat(100_000)))
  quick("a From of brackets", () => text("(".repeat(60_000)))
  quick("a From of groups", () => text("a:".repeat(8_000)))
  quick(
    "a line of blanks that is no field",
    () => "X" + " ".repeat(200_000) + "x\n" + text("u@a.example")
  )
  quick(
    "a signature of semicolons",
    () => "DKIM-Signature: " + ";".repeat(60_000) + "\n" + text("u@a.example")
  )
  quick(
    "500 ARC sets",
    () =>
      Array.from(
        { length: 500 },
        (_, i) =>
          `ARC-Seal: i=${i + 1}; a=rsa-sha256; cv=none; d=a.example; s=s; b=AAAA\n` +
          `ARC-Message-Signature: i=${i + 1}; a=rsa-sha256; d=a.example; s=s; h=from; bh=AA; b=AAAA\n` +
          `ARC-Authentication-Results: i=${i + 1}; a.example\n`
      ).join("") + text("u@a.example")
  )

  const gap = (blanks: number): string => `z=a${" ".repeat(blanks)}b`
  quick("a signature of blanks, four times", () =>
    `${signature}; ${gap(60_000)}\n`.repeat(4).concat(text("u@a.example"))
  )
  quick(
    "50 ARC sets of blanks",
    () =>
      Array.from(
        { length: 50 },
        (_, i) =>
          `ARC-Seal: i=${i + 1}; a=rsa-sha256; cv=none; d=a.example; s=s; b=AAAA; ${gap(7_800)}\n` +
          `ARC-Message-Signature: i=${i + 1}; a=rsa-sha256; d=a.example; s=s; h=from; bh=AA; ` +
          `b=AAAA; ${gap(7_800)}\n` +
          `ARC-Authentication-Results: i=${i + 1}; a.example\n`
      ).join("") + text("u@a.example")
  )
  quick(
    "a Content-Type of 60,000 parameters",
    () =>
      `${signature}\n`.repeat(10) +
      `Content-Type: text/plain${Array.from({ length: 60_000 }, (_, i) => `; a${i}*0=b`).join("")}\n` +
      text("u@a.example")
  )
  quick("a field of 200,000 CR", () => text("u@a.example", `X: ${"\r".repeat(200_000)}x\n`))

  it.effect("names that are asked for are few, whatever a message wants", () =>
    Effect.gen(function* () {
      const asked: Array<DnsZone.Question> = []
      const seals = Array.from(
        { length: 40 },
        (_, i) =>
          `ARC-Seal: i=${i + 1}; a=rsa-sha256; cv=${i === 0 ? "none" : "pass"}; ` +
          `d=s${i}.example; s=s; b=AAAA\n` +
          `ARC-Message-Signature: i=${i + 1}; a=rsa-sha256; d=s${i}.example; ` +
          "s=s; h=from; bh=AA; b=AAAA\n" +
          `ARC-Authentication-Results: i=${i + 1}; a.example\n`
      ).join("")
      const signatures = Array.from(
        { length: 20 },
        (_, i) => signature.replace("a.example", `d${i}.example`) + "\n"
      ).join("")
      const auth = yield* authOf(seals + signatures + text("u@a.b.c.d.e.f.g.h.bank.example"), {
        asked,
        zone: reject("bank.example")
      })
      assert.isAtMost(new Set(asked.map(({ name, type }) => `${type} ${name}`)).size, 20)
      assert.deepStrictEqual([auth.arc, auth.dmarc, auth.dmarc_policy], ["fail", "fail", "reject"])
    })
  )
})

describe("seals", () => {
  const sealing = (message: Mails.Message, auth: Auth, rest: Partial<Seal> = {}): Seal => ({
    ...message,
    auth,
    bodyHash: undefined,
    authservId: "mx.ours.example",
    domain: "ours.example",
    selector: "arc",
    keyFile: undefined,
    ...rest
  })
  const make = (seal: Seal) =>
    MailAuth.use((mailAuth) => mailAuth.seal(seal)).pipe(Effect.provide(over({})))

  it.effect("the key is made once, for its owner only, with its record beside it", () =>
    Effect.gen(function* () {
      const message = Mails.message(text("u@a.example"))
      const auth = yield* authOf(message)
      const seal = sealing(message, auth, { selector: "fresh" })
      // Two processes at once, each with a layer of its own, end up with one key.
      const [one, two] = yield* Effect.all([make(seal), make(seal)], { concurrency: 2 })
      assert.deepStrictEqual(one, two)
      const file = join(keyDirectory, "fresh._domainkey.ours.example.pem")
      assert.strictEqual((yield* Effect.promise(() => stat(file))).mode & 0o777, 0o600)
      const names = yield* Effect.promise(() => readdir(keyDirectory))
      assert.deepStrictEqual(names.filter((name) => name.startsWith("fresh")).toSorted(), [
        "fresh._domainkey.ours.example.pem",
        "fresh._domainkey.ours.example.pem.txt"
      ])
      const line = yield* Effect.promise(() => readFile(`${file}.txt`, "utf8"))
      const strings = [...line.matchAll(/"([^"]*)"/g)].map(([, string]) => string!)
      assert.isTrue(strings.every((string) => string.length <= 255))
      const again = yield* authOf(
        { header: Header.prepend(message.header, one!.fields), body: message.body },
        { zone: { "fresh._domainkey.ours.example": { TXT: [strings] } } }
      )
      assert.deepStrictEqual(
        [again.arc, again.arc_i, again.arc_sealers],
        ["pass", 1, ["ours.example"]]
      )
    })
  )

  const fails = (name: string, file: string, content: string | undefined, mode = 0o600) =>
    it.effect(`${name} is a failure that an operator can mend`, () =>
      Effect.gen(function* () {
        const keyFile = join(keyDirectory, file)
        if (content !== undefined) {
          yield* Effect.promise(() => writeFile(keyFile, content))
          yield* Effect.promise(() => chmod(keyFile, mode))
        }
        const message = Mails.message(text("u@a.example"))
        const error = yield* Effect.flip(
          make(sealing(message, yield* authOf(message), { keyFile }))
        )
        assert.deepStrictEqual([error.reason, error.status], ["key", "4.3.5"])
        assert.include(error.message, keyFile)
      })
    )
  fails("a key file that is not there", "none.pem", undefined)
  fails("a key file that is no key", "text.pem", "hello")
  fails("a key file that everybody can read", "open.pem", arcSign[0]!.privatekey, 0o644)

  it.effect("a key of our own that everybody can read is not replaced", () =>
    Effect.gen(function* () {
      const message = Mails.message(text("u@a.example"))
      const seal = sealing(message, yield* authOf(message), { selector: "opened" })
      const file = join(keyDirectory, "opened._domainkey.ours.example.pem")
      yield* make(seal)
      yield* Effect.promise(() => chmod(file, 0o644))
      const error = yield* Effect.flip(make(seal))
      assert.strictEqual(error.detail, `${file}: every user can read it`)
      yield* Effect.promise(() => chmod(file, 0o600))
      assert.isDefined(yield* make(seal))
    })
  )

  it.effect("a set that could be broken by our own DNS is not sealed as broken", () =>
    Effect.gen(function* () {
      const message = yield* Effect.promise(() => Mails.seal(text("u@a.example"), "list.example"))
      const found = yield* verify(message, { zone: { "s._domainkey.list.example": "SERVFAIL" } })
      assert.strictEqual(found.auth.arc, "fail")
      assert.isUndefined(found.bodyHash)
    })
  )

  it.effect("a body that cannot be canonicalised is not sealed", () =>
    Effect.gen(function* () {
      const message = Mails.message(text("u@a.example") + "x".repeat(70_000))
      assert.isUndefined(yield* make(sealing(message, yield* authOf(message))))
    })
  )
})
