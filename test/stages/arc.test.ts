// SPDX-License-Identifier: AGPL-3.0-or-later
import { generateKeyPairSync } from "node:crypto"
import { mkdtempSync } from "node:fs"
import { chmod, readFile, rm, writeFile } from "node:fs/promises"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { afterAll } from "vitest"
import { assert, describe, it } from "@effect/vitest"
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as Result from "effect/Result"
import * as TestClock from "effect/testing/TestClock"
import { DnsNode } from "../../layers/DnsNode.ts"
import { MailAuthMailauth } from "../../layers/MailAuthMailauth.ts"
import * as Header from "../../src/mail/Header.ts"
import type { WithBody } from "../../src/pipeline/Stage.ts"
import type { Auth, State } from "../../src/pipeline/State.ts"
import type { Patch, Verdict } from "../../src/pipeline/Verdict.ts"
import type { Dns } from "../../src/services/Dns.ts"
import { MailAuth } from "../../src/services/MailAuth.ts"
import arc, { judge } from "../../stages/arc.ts"
import * as DnsServer from "../support/DnsServer.ts"
import * as DnsZone from "../support/DnsZone.ts"
import * as Mails from "../support/Mails.ts"

const keyDirectory = mkdtempSync(join(tmpdir(), "pepsi-arc-"))
afterAll(() => rm(keyDirectory, { recursive: true, force: true }))

/** The section's values: what is written, and the defaults. */
const values = (written: { readonly [name: string]: string } = {}) =>
  Object.fromEntries(
    Object.entries(arc.settings).map(([name, option]) => [
      name,
      Result.getOrThrow(option.read(written[name] ?? option.default ?? ""))
    ])
  )

const client = { ip: "192.0.2.1", port: 25, helo: "out.example", proto: "ESMTP", listener: "mx" }

interface Given {
  readonly sender?: string
  readonly state?: State
  readonly attempts?: number
}

const foreign: State = { local_origin: false, client }

const mailOf = (
  message: Mails.Message,
  { attempts = 0, sender = "", state = foreign }: Given = {}
): WithBody => {
  const mail: WithBody = {
    id: 1,
    rev: 0,
    token: "0".repeat(32),
    sender,
    recipients: ["dave@ours.example"],
    fromHeader: null,
    subject: null,
    section: "init",
    state,
    sizeBytes: message.header.raw.length + 2 + message.body.length,
    hdrFlags: null,
    messageId: null,
    listId: null,
    settings: {},
    receivedAt: DateTime.makeUnsafe(0),
    attempts,
    repeat: false,
    needHeaders: Effect.suspend(() => Effect.succeed(mail)),
    needPrefix: () => Effect.succeed(mail),
    needBody: Effect.suspend(() => Effect.succeed(mail)),
    ...message
  }
  return mail
}

const over = (dns: Layer.Layer<Dns>) =>
  MailAuthMailauth({ hostname: "mx.ours.example", keyDirectory }).pipe(Layer.provide(dns))

const run = (mail: WithBody, written?: { readonly [name: string]: string }) =>
  arc.run(mail, values(written)) as Effect.Effect<Verdict, never, MailAuth>

const runIn = (zone: DnsZone.Zone, mail: WithBody, written?: { readonly [name: string]: string }) =>
  run(mail, written).pipe(Effect.provide(over(DnsZone.memory(zone))))

/** The row as the next section gets it. */
const after = (mail: WithBody, { header, state, unset = [] }: Patch, attempts = 0): WithBody => {
  const merged: { [key: string]: unknown } = { ...mail.state, ...state }
  for (const name of unset) delete merged[name]
  return mailOf(
    { header: header ?? mail.header, body: mail.body },
    { sender: mail.sender, state: merged as State, attempts }
  )
}

const authOf = ({ patch }: Verdict): Auth => patch.state!.auth!
const text = (from: string): string =>
  `Received: from out.example\nFrom: ${from}\nTo: dave@ours.example\nSubject: s\n\nHello.\n`
const names = (header: Header.Header) => header.fields.map(({ name }) => name)
const key = (domain: string): DnsZone.Zone => ({
  [`s._domainkey.${domain}`]: { TXT: [Mails.keyRecord] }
})

describe("the examples of the specification", () => {
  it.live("A-ARC-1: both signatures of RFC 8463 appendix A.3 pass, over a real name server", () =>
    Effect.gen(function* () {
      const server = yield* DnsServer.start({
        "brisbane._domainkey.football.example.com": {
          TXT: ["v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="]
        },
        "test._domainkey.football.example.com": {
          TXT: [
            [
              "v=DKIM1; k=rsa; p=MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDkHlOQ",
              "oBTzWRiGs5V6NpP3idY6Wk08a5qhdR6wy5bdOKb2jLQiY/J16JYi0Qvx/b",
              "yYzCNb3W91y3FutACDfzwQ/BC/e/8uBsCR+yz1Lxj+PL6lHvqMKrM3rG4hstT5",
              "QjvHO9PzoxZyVYLzBfO2EeC3Ip3G+2kryOTIKT+l/K4w3QIDAQAB"
            ]
          ]
        }
      })
      const message = Mails.message(
        yield* Effect.promise(() => readFile("test/vectors/dkim/rfc8463.eml"))
      )
      const verdict = yield* run(mailOf(message)).pipe(
        Effect.provide(over(DnsNode({ servers: [server.address] })))
      )
      const { aligned, dkim } = authOf(verdict)
      assert.deepStrictEqual(
        dkim.map((one) => [one.a, one.result, one.aligned]),
        [
          ["ed25519-sha256", "pass", true],
          ["rsa-sha256", "pass", true]
        ]
      )
      assert.isTrue(aligned)
    }).pipe(Effect.scoped)
  )

  it.effect("A-ARC-2: the organizational domain has the policy and decides alignment", () =>
    Effect.gen(function* () {
      const zone: DnsZone.Zone = {
        "_dmarc.example.com": { TXT: ["v=DMARC1; p=none; sp=reject"] },
        "bounce.example.com": { TXT: ["v=spf1 ip4:192.0.2.1 -all"] },
        "other.example": { TXT: ["v=spf1 ip4:192.0.2.1 -all"] }
      }
      const message = Mails.message(text("a@mail.example.com"))
      const aligned = authOf(
        yield* runIn(zone, mailOf(message, { sender: "x@bounce.example.com" }))
      )
      assert.deepStrictEqual(
        [aligned.spf, aligned.dmarc, aligned.dmarc_domain, aligned.aligned],
        ["pass", "pass", "example.com", true]
      )
      const other = yield* runIn(zone, mailOf(message, { sender: "x@other.example" }))
      assert.deepStrictEqual(
        [authOf(other).spf, authOf(other).dmarc, authOf(other).dmarc_policy],
        ["pass", "fail", "reject"]
      )
      assert.include(
        Header.first(other.patch.header!, "Authentication-Results")!,
        "dmarc=fail (p=reject dis=reject)"
      )
    })
  )

  it.effect("A-ARC-3: a result in our name that came with the mail gives way to ours", () =>
    Effect.gen(function* () {
      const forged = "Authentication-Results: MX.ours.example; dkim=pass header.d=bank.example\n"
      const { patch } = yield* runIn({}, mailOf(Mails.message(forged + text("u@bank.example"))), {
        MODE: "verify"
      })
      assert.deepStrictEqual(names(patch.header!), [
        "Authentication-Results",
        "Received",
        "From",
        "To",
        "Subject"
      ])
      assert.match(
        Header.first(patch.header!, "Authentication-Results")!,
        /^mx\.ours\.example; .*dkim=none/
      )
    })
  )

  it.effect("A-ARC-4: nine labels without a record cost exactly eight questions", () =>
    Effect.gen(function* () {
      const asked: Array<DnsZone.Question> = []
      const mail = mailOf(Mails.message(text("u@a.b.c.d.e.f.g.h.example")), { state: {} })
      const verdict = yield* run(mail).pipe(Effect.provide(over(DnsZone.memory({}, asked))))
      assert.deepStrictEqual(
        asked,
        [
          "a.b.c.d.e.f.g.h.example",
          "c.d.e.f.g.h.example",
          "d.e.f.g.h.example",
          "e.f.g.h.example",
          "f.g.h.example",
          "g.h.example",
          "h.example",
          "example"
        ].map((name) => ({ name: `_dmarc.${name}`, type: "TXT" }))
      )
      assert.strictEqual(authOf(verdict).dmarc, "none")
    })
  )

  it.effect("A-ARC-5: without any answer of the DNS the mail goes on after one pause", () =>
    Effect.gen(function* () {
      const zone = new Proxy<DnsZone.Zone>({}, { get: () => "TIMEOUT" })
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.b.c.example"), { domain: "a.b.c.example" })
      )
      const mail = mailOf(Mails.message(signed), { sender: "u@a.b.c.example" })
      yield* runIn({}, mail, { MODE: "verify" }) // so that loading the library takes none of the time
      const [first, seconds] = yield* Mails.elapse(runIn(zone, mail, { MODE: "verify" }))
      assert.deepStrictEqual(
        first.decision._tag === "Defer" && first.decision.after,
        Duration.seconds(30)
      )
      assert.deepStrictEqual(first.patch, {})
      assert.isAtMost(seconds, 20)
      const [second, again] = yield* Mails.elapse(
        runIn(zone, after(mail, first.patch, 1), { MODE: "verify" })
      )
      assert.isAtMost(again, 20)
      assert.strictEqual(second.decision._tag, "Pass")
      const { aligned, dkim, dmarc, spf } = authOf(second)
      assert.deepStrictEqual(
        [spf, dkim[0]!.result, dmarc, aligned],
        ["temperror", "temperror", "temperror", false]
      )
    })
  )

  it.effect("A-ARC-6: our set follows a valid one and verifies, a second run adds nothing", () =>
    Effect.gen(function* () {
      const zone = { ...key("list.example") }
      const mail = mailOf(
        Mails.message(yield* Effect.promise(() => Mails.seal(text("u@a.example"), "list.example")))
      )
      const { decision, patch } = yield* runIn(zone, mail)
      assert.strictEqual(decision._tag, "Pass")
      assert.deepStrictEqual(names(patch.header!).slice(0, 5), [
        "ARC-Seal",
        "ARC-Message-Signature",
        "ARC-Authentication-Results",
        "Authentication-Results",
        "ARC-Seal"
      ])
      assert.match(Header.first(patch.header!, "ARC-Seal")!, /^i=2; .*cv=pass/)
      assert.strictEqual(patch.state!.sealed, "i=2; d=mx.ours.example; s=arc")
      const once = after(mail, patch)
      const record = yield* Effect.promise(() =>
        readFile(join(keyDirectory, "arc._domainkey.mx.ours.example.pem.txt"), "utf8")
      )
      const strings = [...record.matchAll(/"([^"]*)"/g)].map(([, string]) => string!)
      // The next host looks at it afresh.
      const next = yield* runIn(
        { ...zone, "arc._domainkey.mx.ours.example": { TXT: [strings] } },
        mailOf({ header: once.header, body: once.body }),
        { AUTHSERV_ID: "next.example", MODE: "verify" }
      )
      assert.deepStrictEqual(
        [authOf(next).arc, authOf(next).arc_i, authOf(next).arc_sealers],
        ["pass", 2, ["list.example", "mx.ours.example"]]
      )
      const twice = yield* runIn({}, once)
      assert.deepStrictEqual([twice.decision, twice.patch], [decision, {}])
    })
  )
})

describe("arc", () => {
  it.effect("forgets the peer unless told otherwise", () =>
    Effect.gen(function* () {
      const mail = mailOf(Mails.message(text("u@a.example")))
      assert.deepStrictEqual((yield* runIn({}, mail)).patch.unset, ["client"])
      assert.isUndefined((yield* runIn({}, mail, { KEEP_CLIENT: "yes" })).patch.unset)
    })
  )

  it.effect("leaves mail of local origin alone but for forged results and the peer", () =>
    Effect.gen(function* () {
      const asked: Array<DnsZone.Question> = []
      const state: State = { local_origin: true, client }
      const layer = over(DnsZone.memory({}, asked))
      const forged = mailOf(
        Mails.message(
          "Authentication-Results: mx.ours.example; dmarc=pass\n" + text("u@ours.example")
        ),
        { state }
      )
      const { decision, patch } = yield* Effect.provide(run(forged), layer)
      assert.deepStrictEqual(
        [decision._tag, patch.state, patch.unset],
        ["Pass", undefined, ["client"]]
      )
      assert.deepStrictEqual(names(patch.header!), ["Received", "From", "To", "Subject"])
      const clean = yield* Effect.provide(
        run(mailOf(Mails.message(text("u@ours.example")), { state: { local_origin: true } })),
        layer
      )
      assert.deepStrictEqual(clean.patch, {})
      assert.deepStrictEqual(asked, [])
    })
  )

  it.effect("judges rows that were made by SQL, without a peer", () =>
    Effect.gen(function* () {
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "a.example" })
      )
      const auth = authOf(
        yield* runIn(
          key("a.example"),
          mailOf(Mails.message(signed), { sender: "u@a.example", state: {} })
        )
      )
      assert.deepStrictEqual([auth.spf, auth.dkim[0]!.result, auth.aligned], ["none", "pass", true])
    })
  )

  it.effect("R19: mail that an answer would save is asked about once more, and then passes", () =>
    Effect.gen(function* () {
      const policy: DnsZone.Zone = { "_dmarc.a.example": { TXT: ["v=DMARC1; p=reject"] } }
      const signed = yield* Effect.promise(() =>
        Mails.sign(text("u@a.example"), { domain: "a.example" })
      )
      const mail = mailOf(Mails.message(signed), { sender: "u@other.example" })
      const first = yield* runIn({ ...policy, "s._domainkey.a.example": "SERVFAIL" }, mail, {
        DMARC_REJECT: "discard"
      })
      assert.strictEqual(first.decision._tag, "Defer")
      const second = yield* runIn({ ...policy, ...key("a.example") }, after(mail, first.patch, 1), {
        DMARC_REJECT: "discard"
      })
      assert.deepStrictEqual([second.decision._tag, authOf(second).dmarc], ["Pass", "pass"])
    })
  )

  it.effect("R20: sealed behind the last change with what was found on entry, it is sound", () =>
    Effect.gen(function* () {
      const zone = key("list.example")
      const mail = mailOf(
        Mails.message(yield* Effect.promise(() => Mails.seal(text("u@a.example"), "list.example")))
      )
      const entry = yield* runIn(zone, mail, { MODE: "verify" })
      assert.isUndefined(entry.patch.state!.sealed)
      const changed = after(mail, { ...entry.patch })
      const footer = mailOf(
        {
          header: changed.header,
          body: Buffer.concat([changed.body, Buffer.from("-- \r\nlist\r\n")])
        },
        { state: changed.state }
      )
      const tail = yield* runIn({}, footer, { MODE: "seal" })
      const record = yield* Effect.promise(() =>
        readFile(join(keyDirectory, "arc._domainkey.mx.ours.example.pem.txt"), "utf8")
      )
      const strings = [...record.matchAll(/"([^"]*)"/g)].map(([, string]) => string!)
      const sink = yield* runIn(
        { ...zone, "arc._domainkey.mx.ours.example": { TXT: [strings] } },
        mailOf({ header: tail.patch.header!, body: footer.body }),
        { AUTHSERV_ID: "sink.example", MODE: "verify" }
      )
      assert.deepStrictEqual([authOf(sink).arc, authOf(sink).arc_i], ["pass", 2])
    })
  )

  it.effect("seals nothing of which it knows nothing", () =>
    Effect.gen(function* () {
      const { patch } = yield* runIn(
        {},
        mailOf(Mails.message(text("u@a.example")), { state: {} }),
        { MODE: "seal" }
      )
      assert.deepStrictEqual(patch, {})
    })
  )

  /** Runs with one service for all, as in a process; what was logged as errors comes with it. */
  const logged = <A, E>(effect: Effect.Effect<A, E, MailAuth>) => {
    const errors: Array<string> = []
    const logger = Logger.make((entry) => {
      if (entry.logLevel === "Error") errors.push(Logger.formatJson.log(entry))
    })
    return Effect.map(effect, (found) => [found, errors] as const).pipe(
      Effect.provide(Layer.merge(over(DnsZone.memory({})), Logger.layer([logger])))
    )
  }
  const openKey = (name: string) =>
    Effect.promise(async () => {
      const file = join(keyDirectory, name)
      const { privateKey } = generateKeyPairSync("ed25519")
      await writeFile(file, privateKey.export({ type: "pkcs8", format: "pem" }))
      await chmod(file, 0o644)
      return file
    })

  it.effect("a seal key that everybody can read does not hold all mail, and the log says why", () =>
    Effect.gen(function* () {
      const file = yield* openKey("open.pem")
      const mail = mailOf(Mails.message(text("u@a.example")))
      const story = Effect.gen(function* () {
        const one = yield* run(mail, { SEAL_KEY: file })
        const two = yield* run(mail, { SEAL_KEY: file })
        yield* TestClock.adjust("1 minute")
        yield* run(mail, { SEAL_KEY: file })
        yield* Effect.promise(() => chmod(file, 0o600))
        return [one, two, yield* run(mail, { SEAL_KEY: file })] as const
      })
      const [[one, two, mended], errors] = yield* logged(story)
      assert.deepStrictEqual([one.decision._tag, two.decision._tag], ["Pass", "Pass"])
      assert.strictEqual(authOf(one).dmarc, "none")
      assert.isUndefined(one.patch.state!.sealed)
      assert.deepStrictEqual(names(one.patch.header!).slice(0, 2), [
        "Authentication-Results",
        "Received"
      ])
      assert.strictEqual(mended.patch.state!.sealed, "i=1; d=mx.ours.example; s=arc")
      // Once a minute, not once a message.
      assert.lengthOf(errors, 2)
      for (const error of errors) assert.include(error, `${file}: every user can read it`)
    })
  )

  it.effect("a section that only seals waits for its key, and the log says why", () =>
    Effect.gen(function* () {
      const file = yield* openKey("open2.pem")
      const mail = mailOf(Mails.message(text("u@a.example")))
      const story = Effect.gen(function* () {
        const { patch } = yield* run(mail, { MODE: "verify" })
        const sealing = arc.run(after(mail, patch), values({ MODE: "seal", SEAL_KEY: file }))
        return yield* Effect.flip(
          sealing as Effect.Effect<Verdict, { readonly status: string }, MailAuth>
        )
      })
      const [error, errors] = yield* logged(story)
      // RFC 3463: 4.x.x is tried again.
      assert.strictEqual(error.status, "4.3.5")
      assert.lengthOf(errors, 1)
      assert.include(errors[0], file)
    })
  )
})

describe("what becomes of mail that fails DMARC", () => {
  const auth = (dmarc: string, dmarc_policy: string | null): Auth => ({
    spf: "none",
    spf_domain: null,
    dkim: [],
    dmarc,
    dmarc_policy,
    dmarc_domain: null,
    arc: "none",
    arc_i: 0,
    arc_sealers: [],
    from_domain: null,
    aligned: false
  })
  type Mode = "tag" | "discard" | "quarantine"
  const decided = (dmarc: string, policy: string | null, mode: Mode, target?: string) => {
    const { decision } = judge(auth(dmarc, policy), { DMARC_REJECT: mode, POLICY_FAIL: target })
    return decision._tag === "Pass" ? (decision.to ?? "NEXT") : decision._tag
  }
  const rules: ReadonlyArray<readonly [Parameters<typeof decided>, string]> = [
    [["fail", "reject", "tag", "jail"], "NEXT"],
    [["fail", "reject", "quarantine", "jail"], "jail"],
    [["fail", "reject", "discard", "jail"], "Done"],
    [["fail", "reject", "quarantine"], "NEXT"],
    [["fail", "quarantine", "quarantine", "jail"], "jail"],
    [["fail", "quarantine", "discard", "jail"], "jail"],
    [["fail", "quarantine", "discard"], "NEXT"],
    [["fail", "none", "discard", "jail"], "NEXT"],
    [["permerror", null, "quarantine", "jail"], "jail"],
    [["permerror", null, "discard", "jail"], "jail"],
    [["permerror", null, "discard"], "NEXT"],
    [["temperror", "reject", "discard", "jail"], "NEXT"],
    [["pass", "reject", "discard", "jail"], "NEXT"],
    [["none", null, "discard", "jail"], "NEXT"]
  ]
  for (const [given, expected] of rules)
    it(`${given.join(" ")} → ${expected}`, () => assert.strictEqual(decided(...given), expected))
})
